"""Architectures, one file each, in the folder of their family; models/registry.py lists them."""
