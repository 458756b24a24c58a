"""Granite."""
