"""Terminal output that is safe for untrusted text from files, models, servers and workers."""
