"""Pictures and sounds in requests: references in bodies, and their loading."""
