"""Clusters whose servers and workers Ray places (the extra `ray`)."""
