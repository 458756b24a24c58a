"""Llama and architectures derived from it."""
