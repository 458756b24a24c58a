"""MiniMax architectures."""
