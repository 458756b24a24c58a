"""Servers of the Model Context Protocol: their processes, sessions and tools."""
