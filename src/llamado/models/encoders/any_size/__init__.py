"""Encoders of pictures of any size, within limits."""
