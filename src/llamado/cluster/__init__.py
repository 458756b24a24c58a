"""Many processes and machines: what a cluster is made of, how it stands, and what it lacks."""
