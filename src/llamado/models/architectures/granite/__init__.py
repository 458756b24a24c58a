"""Granite architectures."""
