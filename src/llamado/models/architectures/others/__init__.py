"""Families with a single architecture."""
