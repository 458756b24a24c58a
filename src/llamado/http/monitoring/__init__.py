"""Request counting and its Prometheus families, shared by server, router and gateway."""
