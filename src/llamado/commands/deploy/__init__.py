"""`llamado deploy`: the command, and the memory that its deployments may take."""
