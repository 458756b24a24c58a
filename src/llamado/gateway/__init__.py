"""Gateway: load balancing over many replicas of a server (llamado or llama-server) behind one address."""
