"""Tokens that probably come next: where they come from, and which of them are worth evaluating."""
