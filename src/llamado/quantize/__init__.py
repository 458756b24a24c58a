"""Making models smaller: weights in blocks of few bits, as llama-quantize writes them, and what weighs their errors."""
