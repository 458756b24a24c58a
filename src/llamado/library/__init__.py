"""A model in one's own process, with the spellings of llama-cpp-python: its users change one import.

What a method takes and gives is what that library's method of the name takes and gives. Not here: images, and
tokenizers of other libraries.
"""
