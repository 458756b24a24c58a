"""llama-server's own tools."""
