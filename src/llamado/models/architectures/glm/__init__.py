"""GLM architectures."""
