"""Ollama's API (https://github.com/ollama/ollama/blob/main/docs/api.md) without creating and publishing of models."""
