"""Measures the rooms from outside."""
