"""Parts of media encoders."""
