"""HTTP endpoints of the router."""
