"""Processes that this one starts and that do not outlive it."""
