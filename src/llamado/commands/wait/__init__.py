"""`llamado wait`: the command, and the addresses of running llamado processes."""
