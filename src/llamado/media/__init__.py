"""Media in prompts: decoding pictures and sounds, preparing them for encoders, and their place among tokens."""
