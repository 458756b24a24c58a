"""Endpoints of audio: transcriptions and translations."""
