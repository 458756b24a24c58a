"""`llamado gateway`: run a gateway, and drain its replicas."""
