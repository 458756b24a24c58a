"""A model in one's own process, with the spellings of llama-cpp-python: its users change one import.

What a method takes and gives is what that library's method of the name takes and gives. Not here: what it can do only
with llama.cpp's own memory (`eval`, `sample`, `scores`, logits processors), images, and tokenizers of other libraries.
"""
