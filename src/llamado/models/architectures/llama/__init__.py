"""Llama and those that follow it."""
