"""Hunyuan architectures."""
