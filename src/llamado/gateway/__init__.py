"""Many replicas of a server behind one address: ours, or the real llama-server."""
