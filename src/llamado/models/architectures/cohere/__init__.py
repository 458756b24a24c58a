"""Cohere architectures."""
