"""Conversations: their turns, the templates that write them, and which of their tokens are learnt."""
