"""Mixture-of-experts families without dense models."""
