"""GPT-2, and those that keep to its layer norms."""
