"""Weights in super-blocks of 256 with sub-blocks that have whole scales of their own."""
