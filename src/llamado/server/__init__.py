"""The HTTP server: llama-server's endpoints over an engine. Handles requests and events, no tensors."""
