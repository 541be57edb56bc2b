"""DeepSpeed config files: parsed strictly, checked against a run, and prepared for the Trainer. Never imports torch."""
