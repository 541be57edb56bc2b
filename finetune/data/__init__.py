"""From hub, files or the built-in text to token ids: loading, checking, tokenizing, caching, batching by length."""
