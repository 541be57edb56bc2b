"""What a config says of a model without tracing it: sizes, and impossible shapes."""
