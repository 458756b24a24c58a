"""Liquid AI's architectures."""
