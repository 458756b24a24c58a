"""The kernels, one file per family."""
