"""`llamado top`: the machines of a server in a terminal, while they work."""
