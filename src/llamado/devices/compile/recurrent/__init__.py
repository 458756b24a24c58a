"""Compilation of operations that carry a state from token to token."""
