"""Commands for model files: list, show, rm, gguf, quantize and imatrix."""
