"""Hunyuan."""
