"""Moonshot AI's architectures."""
