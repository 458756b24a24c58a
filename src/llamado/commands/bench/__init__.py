"""`llamado bench` and `llamado perplexity`: measurements of speed, machine limits and quality."""
