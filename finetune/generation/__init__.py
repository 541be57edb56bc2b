"""What a model answers: prompts read, tokenized and batched, answers sampled and written, on any number of ranks."""
