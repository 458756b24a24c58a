"""`llamado up` and the commands for its clusters: ps, down, logs and drain."""
