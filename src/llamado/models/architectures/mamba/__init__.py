"""Mamba, and what has its state spaces beside attention."""
