"""Families of one."""
