"""Checkpoints that are whole or not there: written, named in a manifest, verified, chosen, kept and deleted."""
