"""Quantization: weights in blocks of few bits, as written by llama-quantize, and importance matrices."""
