"""Ollama's API (https://github.com/ollama/ollama/blob/main/docs/api.md), without what makes or publishes models."""
