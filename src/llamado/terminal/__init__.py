"""Output to terminals: text from files, models, servers and workers cannot steer them."""
