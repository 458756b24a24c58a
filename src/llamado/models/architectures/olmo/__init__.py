"""OLMo architectures."""
