"""DeepSpeed configs as files: read strictly, checked against a run, made ready for the Trainer. Never imports torch."""
