"""DeepSeek and architectures derived from it."""
