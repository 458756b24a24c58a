"""History for the page's live view: samples of the last hour, recent requests, the tail of the log, and a stream."""
