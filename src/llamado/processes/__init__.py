"""Child processes that end with this process."""
