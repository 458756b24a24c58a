"""llama-server's built-in tools."""
