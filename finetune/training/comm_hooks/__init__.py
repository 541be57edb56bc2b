"""Gradients compressed between ranks, through the communication hooks of torch's DistributedDataParallel."""
