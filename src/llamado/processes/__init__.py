"""This process and its children: children that end with it, its secrets and its memory."""
