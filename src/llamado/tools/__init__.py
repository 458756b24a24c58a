"""Tools for models: files and commands of this machine, and servers of the Model Context Protocol."""
