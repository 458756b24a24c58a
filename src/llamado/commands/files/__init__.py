"""Commands that make model files of others."""
