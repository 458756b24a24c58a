"""Kernels of all devices, one file per family."""
