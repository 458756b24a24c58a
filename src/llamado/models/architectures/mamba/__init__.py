"""Mamba, and hybrids of Mamba and attention."""
