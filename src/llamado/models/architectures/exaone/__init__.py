"""EXAONE architectures."""
