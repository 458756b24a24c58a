"""Encoders of sounds."""
