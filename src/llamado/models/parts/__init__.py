"""What layers of many architectures are made of: norms, attention, feed-forward networks."""
