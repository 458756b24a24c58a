"""Quantizers, one file per family of types, and the searches that they share."""
