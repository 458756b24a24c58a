"""Models that read a whole text at once and give vectors."""
