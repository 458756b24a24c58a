"""Clusters of processes and machines: configuration, supervision, deployment files and diagnosis."""
