"""One file per architecture, in the folder of its family; models/registry.py lists them."""
