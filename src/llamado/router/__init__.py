"""Many processes as one: which machine does what."""
