"""Speculative decoding: sources of draft tokens, and the choice of drafts worth evaluating."""
