"""What a config says of a model without tracing it: sizes, impossible shapes, and the tensors of ResNets."""
