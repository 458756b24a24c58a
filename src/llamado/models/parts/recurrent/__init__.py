"""Building blocks of layers with recurrent state."""
