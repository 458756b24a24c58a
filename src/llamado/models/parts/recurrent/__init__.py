"""Parts of layers that remember a state."""
