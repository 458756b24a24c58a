"""Kernels of the CPU device, one file per family."""
