"""ggml's RPC: the wire, a remote device, a worker, a tap."""
