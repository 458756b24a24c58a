"""ggml's RPC: the wire codec, a remote device, a worker and a tap."""
