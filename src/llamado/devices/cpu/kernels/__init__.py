"""Kernels of the CPU alone: the threads' loop over a program, and requests for pages of mapped files."""
