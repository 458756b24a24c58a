"""llamado serves GGUF language models over HTTP and splits one model over many machines."""

__version__ = "0.1.0"
