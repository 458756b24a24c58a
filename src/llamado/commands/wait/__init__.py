"""`llamado wait`: the command, and the addresses on which llamado's processes listen."""
