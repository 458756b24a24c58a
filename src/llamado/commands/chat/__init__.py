"""`llamado run`: a conversation in a terminal, with a model of this process or with a server."""
