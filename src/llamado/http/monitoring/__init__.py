"""Counts of requests, for routers and gateways as for servers, and their form for Prometheus."""
