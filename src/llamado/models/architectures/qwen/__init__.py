"""Qwen."""
