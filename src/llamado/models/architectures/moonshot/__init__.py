"""Moonshot AI's models."""
