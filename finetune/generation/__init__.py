"""Generation on any number of ranks: read, tokenize and batch prompts; sample and write answers."""
