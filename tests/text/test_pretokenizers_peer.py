"""The stored words and flags of the pre-tokenizers are what the real llama.cpp has, asked again."""

from __future__ import annotations

from pathlib import Path

import peer_words
import pytest

pytestmark = [pytest.mark.interop, pytest.mark.full]


def test_the_stored_words_are_the_peers(peer_bin: Path, tmp_path: Path) -> None:
    stored = peer_words.read()
    assert peer_words.peer_words(peer_bin, list(stored), tmp_path) == stored


def test_the_stored_flags_are_the_peers(peer_bin: Path, tmp_path: Path) -> None:
    assert peer_words.peer_flags(peer_bin, tmp_path) == peer_words.read_flags()
