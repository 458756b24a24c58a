"""HTTP: llama-server's endpoints over an engine. Knows requests and events, nothing of tensors."""
