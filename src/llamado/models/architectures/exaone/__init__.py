"""EXAONE."""
