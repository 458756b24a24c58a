"""OLMo."""
