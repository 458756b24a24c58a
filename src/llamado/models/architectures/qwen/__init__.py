"""Qwen architectures."""
