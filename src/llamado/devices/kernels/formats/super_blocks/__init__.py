"""Weights in super-blocks of 256 whose sub-blocks have integer scales."""
