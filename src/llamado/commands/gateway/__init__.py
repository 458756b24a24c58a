"""`llamado gateway`, and draining its replicas."""
