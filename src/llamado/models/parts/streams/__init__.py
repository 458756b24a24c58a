"""Several streams of hidden states in the place of one."""
