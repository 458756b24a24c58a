"""Projector files with two kinds of media, of which one is not supported."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from projectors import every, spec

from llamado.gguf.metadata import Metadata
from llamado.gguf.reader import GGUFFile
from llamado.models.encoders.registry import load_encoders
from llamado.models.errors import UnsupportedModel


def test_pictures_are_served_without_the_sounds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Gemma 3n's files have an encoder of sounds that is not supported, as in llama.cpp."""
    with GGUFFile.open(spec.make(every()["gemma3"], tmp_path / "mmproj.gguf")) as file:
        header = file.header
    kinds = {"clip.projector_type": "", "clip.vision.projector_type": "gemma3", "clip.audio.projector_type": "gemma3na"}
    both = replace(header, metadata=Metadata({**header.metadata, **kinds, "clip.has_audio_encoder": True}))
    with caplog.at_level(logging.WARNING):
        found = load_encoders(both)
    assert found.image is not None and found.audio is None
    assert "audio input is off, the projector 'gemma3na' is not supported" in caplog.text
    sounds = replace(both, metadata=Metadata({**both.metadata, "clip.has_vision_encoder": False}))
    with pytest.raises(UnsupportedModel, match="gemma3na"):
        load_encoders(sounds)
