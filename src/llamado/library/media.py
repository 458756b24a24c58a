"""Pictures and sounds in the messages of a chat: files, `data:` URIs and URLs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llamado.engine.loaded_model import LoadedModel
from llamado.library.errors import LibraryError
from llamado.media.chunks import MediaPrompt
from llamado.media.encoded import is_data_uri, read_encoded
from llamado.media.errors import MediaError
from llamado.media.markers import MarkerPart, joined, new_marker
from llamado.media.media import Media

MOST_BYTES = 64 << 20
"""Bytes of a file behind a path or URL."""
_SECONDS = 60.0
_SOURCES = {"image_url": ("url",), "input_audio": ("data", "url")}
"""Content parts that are media, and the fields that have their data."""


class ChatMedia:
    """The pictures and sounds of a chat, in order, and the marker that stands for each in the text."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._marker = new_marker()
        self._media: list[Media] = []

    def take(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the messages with markers in place of media. Raises LibraryError and MediaError."""
        return [self._without_media(message) for message in messages]

    def prompt(self, text: str) -> MediaPrompt:
        """Return the tokens of the text that the messages were rendered to. Raises LibraryError and MediaError."""
        if not self._media:
            return MediaPrompt(self._model.tokenize(text, add_special=True))
        n = text.count(self._marker)
        if n != len(self._media):
            raise LibraryError(f"the chat template shows {n} of {len(self._media)} pictures and sounds")
        return self._model.media_prompt(text, self._media, marker=self._marker)

    def _without_media(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        content = message.get("content")
        if not isinstance(content, Sequence) or isinstance(content, str):
            return message
        parts = [self._replaced(part) for part in content]
        return {**message, "content": joined(parts) if any(isinstance(p, MarkerPart) for p in parts) else parts}

    def _replaced(self, part: Mapping[str, Any]) -> Mapping[str, Any]:
        kind = part.get("type")
        if kind == "text":
            return part
        if kind not in _SOURCES:
            raise LibraryError(f"a message has a part of type {kind!r}: expected text, image_url or input_audio")
        given = part.get(kind)
        if isinstance(given, Mapping):
            given = next((given[name] for name in _SOURCES[kind] if given.get(name)), None)
        if not isinstance(given, str):
            raise LibraryError(f"a part of type {kind} needs a path, a data URI or a URL")
        self._media.append(self._decode(read_source(given, encoded=kind == "input_audio")))
        return MarkerPart(type="text", text=self._marker)

    def _decode(self, data: bytes) -> Media:
        from llamado.media.decode import decode, kind_of

        kind, encoders = kind_of(data), self._model.encoders
        if encoders is None:
            raise MediaError(f"this model takes no {kind.value} input: load it with its projector file (mmproj)")
        return decode(data, kind, encoders.of(kind).rate)


def read_source(text: str, *, encoded: bool = False) -> bytes:
    """Return the bytes of a picture or sound: a `data:` URI, an http(s) or file URL, or a path.

    `encoded`: text that is none of these is base64, not a path. Raises MediaError.
    """
    if is_data_uri(text):
        return read_encoded(text)
    if text.startswith(("http://", "https://")):
        return _download(text)
    if encoded and not text.startswith("file://"):
        return read_encoded(text)
    path = Path(text.removeprefix("file://")).expanduser()
    try:
        with open(path, "rb") as stream:
            data = stream.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise MediaError(f"{path}: it cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MOST_BYTES:
        raise MediaError(f"{path}: it has more than {MOST_BYTES} bytes")
    return data


def _download(url: str) -> bytes:
    import httpx

    from llamado.outgoing import limits, open_client

    try:
        with open_client(follow_redirects=True, timeout=_SECONDS) as client:
            answer = client.get(url, extensions=limits(MOST_BYTES, _SECONDS))
            answer.raise_for_status()
            return answer.content
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise MediaError(f"{url}: {error or type(error).__name__}") from None
