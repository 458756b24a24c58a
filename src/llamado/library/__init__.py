"""A model in the calling process, with llama-cpp-python's interface: its users change one import.

Methods have the arguments and results of that library's methods of the same name. Images and tokenizers of other
libraries are not supported.
"""
