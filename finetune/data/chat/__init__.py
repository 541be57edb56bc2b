"""Conversations: their turns, the templates that render them, and which of their tokens are trained on."""
