"""Media in the engine: chunks in sequences, and running encoders."""
