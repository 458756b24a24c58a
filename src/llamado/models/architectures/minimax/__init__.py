"""MiniMax."""
