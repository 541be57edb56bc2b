"""The forward pass of a model, recorded on a tape as its modules run it in eager mode: from its trace, or as it is
written down for ResNets."""
