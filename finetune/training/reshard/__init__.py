"""Going on with another number of ranks, another ZeRO stage, or another engine than those that wrote a checkpoint."""
