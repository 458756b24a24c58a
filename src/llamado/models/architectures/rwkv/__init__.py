"""RWKV and what was made of it."""
