"""What the page's live view shows: the last hour, the last requests, the last lines of the log, and what changes."""
