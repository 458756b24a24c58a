"""RWKV and architectures derived from it."""
