"""Servers of the Model Context Protocol: their processes, their sessions, their tools."""
