"""`llamado deploy`: the command, and memory limits of deployments."""
