"""Mixtures of experts of families that have nothing else."""
