"""Phi architectures."""
