"""ERNIE architectures."""
