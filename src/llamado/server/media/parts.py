"""Pictures and sounds in bodies: content parts of chats, replaced by markers, and references to their data.

A marker stands for a picture or sound in the text that a chat template renders (`oaicompat_content_load_media`,
b11434). Each chat has a marker of its own, which no client can guess, so no text in a message is taken for one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from llamado.media.markers import MarkerPart, new_marker
from llamado.media.media import MediaKind
from llamado.server.errors import ApiError, invalid

if TYPE_CHECKING:
    from llamado.media.chunks import Piece


class PreparedMedia(NamedTuple):
    """The pieces of a prompt that one picture or sound becomes."""

    pieces: Sequence[Piece]
    seconds: float = 0.0
    """Duration of a sound."""


MOST_MEDIA = 128
"""Most pictures and sounds of one request."""

_KINDS = {
    "image_url": MediaKind.IMAGE,
    "input_audio": MediaKind.AUDIO,
    "input_video": None,
    "video_url": None,
}
"""Types of content parts that are media; None: no model takes them."""


@dataclass(frozen=True, slots=True)
class MediaReference:
    """A picture or sound that a body names: base64 text, a `data:` URI, or a URL."""

    text: str
    role: str = "image"
    """The word for it in errors."""


@dataclass(slots=True)
class ChatMedia:
    """The pictures and sounds of a chat, in order, and the marker that stands for each."""

    marker: str = field(default_factory=new_marker)
    references: list[MediaReference | bytes] = field(default_factory=list)
    """The media as the body names them, or the contents of files."""
    prepared: Sequence[PreparedMedia] = ()
    """The media once they are loaded."""

    def part(self, reference: MediaReference | bytes) -> MarkerPart:
        """Add a picture or sound, and return the content part that stands for it. Raises ApiError for too many."""
        if len(self.references) == MOST_MEDIA:
            raise invalid(f"more than {MOST_MEDIA} pictures and sounds in one request")
        self.references.append(reference)
        return MarkerPart(type="text", text=self.marker)


def not_supported_here(word: str) -> ApiError:
    """Return llama-server's error for media that the model does not take."""
    return invalid(f"{word} input is not supported - hint: if this is unexpected, you may need to provide the mmproj")


def take_media(
    body: Mapping[str, Any], kinds: Collection[MediaKind], marker: str | None = None
) -> tuple[Mapping[str, Any], ChatMedia]:
    """Replace the media of a chat body by markers; return the new body, and the media.

    `kinds`: those that the model takes. `marker`: in place of a new one. Malformed messages stay as they are, for the
    checks that follow. Raises ApiError.
    """
    found = ChatMedia() if marker is None else ChatMedia(marker)
    given = body.get("messages")
    if not isinstance(given, list):
        return body, found
    messages = [_without_media(message, kinds, found) for message in given]
    return ({**body, "messages": messages} if found.references else body), found


def _without_media(message: Any, kinds: Collection[MediaKind], found: ChatMedia) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list) or not any(_type(part) in _KINDS for part in content):
        return message
    return {**message, "content": [_replaced(part, kinds, found) for part in content]}


def _type(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if isinstance(kind, str) else ""


def _replaced(part: Any, kinds: Collection[MediaKind], found: ChatMedia) -> Any:
    name = _type(part)
    if name not in _KINDS:
        return part
    kind = _KINDS[name]
    if kind is None or kind not in kinds:
        raise not_supported_here("video" if kind is None else kind.value)
    return found.part(MediaReference(_source(part.get(name), name, kind), kind.value))


def _source(value: Any, name: str, kind: MediaKind) -> str:
    """Return the text that names a part's data. OpenAI has it in an object; clients also send it bare."""
    if isinstance(value, dict):
        names = ("url",) if kind is MediaKind.IMAGE else ("data", "url")
        value = next((value[key] for key in names if isinstance(value.get(key), str)), None)
    if not isinstance(value, str) or not value:
        hint = "{'url': 'data:image/png;base64,…'}" if kind is MediaKind.IMAGE else "{'data': '…base64…'}"
        raise invalid(f"'{name}' must be {hint}")
    return value


@dataclass(slots=True)
class PromptMedia:
    """A prompt with `multimodal_data`: its text, in which the server's marker stands for each of its references."""

    text: str
    references: list[MediaReference]
    prepared: Sequence[PreparedMedia] = ()
    """The media once they are loaded."""


def take_prompt_media(
    body: Mapping[str, Any], kinds: Collection[MediaKind]
) -> tuple[Mapping[str, Any], list[PromptMedia]]:
    """Replace prompts with media by `PromptMedia` (`tokenize_input_subprompt`, b11434); return the new body, and them.

    Raises ApiError.
    """
    given = body.get("prompt")
    items = given if isinstance(given, list) else [given]
    if not any(_has_media(item) for item in items):
        return body, []
    if not kinds:
        raise invalid("Multimodal data provided, but model does not support multimodal requests.")
    new = [_prompt_media(item) if _has_media(item) else item for item in items]
    found = [item for item in new if isinstance(item, PromptMedia)]
    if sum(len(item.references) for item in found) > MOST_MEDIA:
        raise invalid(f"more than {MOST_MEDIA} pictures and sounds in one request")
    return {**body, "prompt": new if isinstance(given, list) else new[0]}, found


def _has_media(item: Any) -> bool:
    return isinstance(item, dict) and "prompt_string" in item and item.get("multimodal_data") is not None


def _prompt_media(item: Any) -> PromptMedia:
    text, data = item["prompt_string"], item["multimodal_data"]
    if not isinstance(text, str):
        raise invalid("'prompt_string' with multimodal_data must be a string")
    if not isinstance(data, list) or not all(isinstance(one, str) for one in data):
        raise invalid("'multimodal_data' must be an array of base64 strings")
    return PromptMedia(text, [MediaReference(one, "file") for one in data])
