"""Encoders of pictures that are resized to one size."""
