"""Liquid AI's models."""
