"""`llamado top`: live view of a server's machines, or a gateway's replicas, in a terminal."""
