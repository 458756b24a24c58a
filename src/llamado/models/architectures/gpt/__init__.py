"""GPT-2, and architectures that kept its layer norms."""
