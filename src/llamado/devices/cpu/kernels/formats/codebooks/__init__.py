"""Weights in super-blocks of 256 whose eights (or fours) are points of a codebook."""
