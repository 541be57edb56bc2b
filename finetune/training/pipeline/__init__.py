"""Pipeline-parallel training with DeepSpeed's engine, for any model given as a list of layers."""
