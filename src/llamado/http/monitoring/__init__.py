"""Request counts, logs and metrics, shared by server, router and gateway."""
