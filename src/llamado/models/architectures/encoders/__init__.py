"""Encoders, which read a whole text at once and return vectors."""
