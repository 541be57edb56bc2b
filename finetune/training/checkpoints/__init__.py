"""Atomic checkpoints: writing them, recording them in a manifest, verifying, choosing, rotating and deleting them."""
