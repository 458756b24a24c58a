"""Router: one server process that starts, swaps and proxies the model servers of one machine."""
