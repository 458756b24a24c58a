"""Clusters on this machine: starting one, and what works from another terminal."""
