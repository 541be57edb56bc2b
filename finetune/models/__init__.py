"""Models: pretrained ones from a hub id or a folder, and small ones built from a config."""
