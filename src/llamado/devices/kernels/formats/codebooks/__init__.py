"""Weights in super-blocks of 256 whose groups of eight (or four) are points of a codebook."""
