"""DeepSeek and those that follow it."""
