"""Pictures and sounds that the user attaches to a question: content parts with the file's contents."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from llamado.library.media import read_source
from llamado.media.media import MediaKind
from llamado.media.sounds import is_sound

Part = dict[str, Any]
"""A content part of OpenAI's API."""


def attachment(path: str, kind: MediaKind) -> Part:
    """Return the content part for a file (or URL). Raises MediaError."""
    data = read_source(path)
    text = base64.b64encode(data).decode("ascii")
    if kind is MediaKind.IMAGE:
        return {"type": "image_url", "image_url": {"url": f"data:image/{_picture_type(data)};base64,{text}"}}
    return {"type": "input_audio", "input_audio": {"data": text, "format": _sound_type(data)}}


def _picture_type(data: bytes) -> str:
    return "png" if data.startswith(b"\x89PNG") else "jpeg"


def _sound_type(data: bytes) -> str:
    """Return OpenAI's name of a sound's format; servers look at the contents."""
    return "mp3" if is_sound(data) and data[:4] not in (b"RIFF", b"fLaC", b"OggS") else "wav"


def with_attachments(question: str, parts: Sequence[Part]) -> str | list[Part]:
    """Return the content of a message: the attached files, then the question."""
    return [*parts, {"type": "text", "text": question}] if parts else question


def question_of(content: str | list[Part]) -> tuple[str, list[Part]]:
    """Return the text and the attached files of a message."""
    if isinstance(content, str):
        return content, []
    texts = [str(part["text"]) for part in content if part["type"] == "text"]
    return "\n".join(texts), [part for part in content if part["type"] != "text"]
