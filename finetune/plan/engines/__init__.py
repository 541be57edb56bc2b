"""Training engines around autograd: none or DDP, ZeRO-0 to -3, FSDP, a pipeline. Which bytes each holds, and when."""
