"""GGUF files derived from others: split, merged, or with changed key-values."""
