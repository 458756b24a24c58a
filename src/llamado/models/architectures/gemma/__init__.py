"""Gemma architectures."""
