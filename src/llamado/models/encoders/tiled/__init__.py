"""Encoders of pictures that are cut into tiles of one size."""
