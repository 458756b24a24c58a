"""Small projector files with random weights, for every projector."""
