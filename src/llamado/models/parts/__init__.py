"""Building blocks of layers shared by many architectures: norms, attention, feed-forward networks."""
