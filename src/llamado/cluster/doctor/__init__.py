"""What ails a server, a worker, a model's file or this machine: looked for, named, and what mends it."""
