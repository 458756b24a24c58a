"""Files made of others: parts of one, one of parts, one with other key-values."""
