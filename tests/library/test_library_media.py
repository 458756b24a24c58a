"""Pictures and sounds in chats of the library: their sources, their places in the prompt, and chat handlers."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from llamado.errors import LlamadoError
from llamado.library import chat_handlers
from llamado.library import media as library_media
from llamado.library.chat_handlers import Llava15ChatHandler, MTMDChatHandler
from llamado.library.errors import LibraryError
from llamado.library.media import ChatMedia, read_source
from llamado.library.options import engine_options
from llamado.media.chunks import EncoderInput, MediaChunk, MediaPrompt, Piece, tokenize
from llamado.media.errors import MediaError
from llamado.media.media import Media


def prepare(media: Media) -> list[Piece]:
    chunk = MediaChunk(media.kind, EncoderInput((), {}), len(media.data), media.digest)
    return ["[", chunk, "]"]


class Model:
    """A stand-in of LoadedModel: characters are tokens, a picture of h rows has h tokens."""

    def __init__(self) -> None:
        self.encoders = SimpleNamespace(of=lambda kind: SimpleNamespace(rate=16000))

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]:
        return [*text.encode()]

    def media_prompt(self, text: str, media: Sequence[Media], *, marker: str) -> MediaPrompt:
        return tokenize(text, media, self.tokenize, ord, prepare, bos=None, eos=None, marker=marker)


def chat(*parts: Any, model: Any = None) -> str:
    """Return the prompt of a message with these parts, with a `*` for each media token."""
    media = ChatMedia(model or Model())
    (message,) = media.take([{"role": "user", "content": [*parts]}])
    content = message["content"]
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    return "".join("*" if token < 0 else chr(token) for token in media.prompt(text).tokens)


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "a.png"
    Image.fromarray(np.zeros((3, 2, 3), np.uint8)).save(path)
    return path


def image(source: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": source}}


def test_sources_of_pictures(picture: Path) -> None:
    encoded = base64.b64encode(picture.read_bytes()).decode()
    for source in (str(picture), f"file://{picture}", f"data:image/png;base64,{encoded}"):
        assert chat({"type": "text", "text": "a"}, image(source), {"type": "text", "text": "b"}) == "a[***]b"
    assert chat({"type": "image_url", "image_url": str(picture)}) == "[***]"
    assert chat({"type": "input_audio", "input_audio": {"data": encoded}}) == "[***]"  # the contents decide
    assert chat({"type": "text", "text": "<__media__>"}) == "<__media__>"
    assert chat({"type": "text", "text": "<__media__>"}, image(str(picture))) == "<__media__>[***]"


def test_broken_sources(picture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for source, why in (
        (str(tmp_path / "none.png"), "cannot be read"), ("a\0b", "cannot be read"), (str(tmp_path), "cannot be read"),
        ("data:image/png;base64,!", "Invalid base64"), ("http://[", "http://"),
    ):  # fmt: skip
        with pytest.raises(MediaError, match=why):
            read_source(source)
    with pytest.raises(LibraryError, match="needs a path"):
        chat({"type": "image_url", "image_url": {}})
    monkeypatch.setattr(library_media, "MOST_BYTES", 10)
    with pytest.raises(MediaError, match="more than 10 bytes"):
        read_source(str(picture))


def test_a_model_without_projector(picture: Path) -> None:
    model = Model()
    model.encoders = None  # type: ignore[assignment]
    with pytest.raises(LlamadoError, match="load it with its projector file"):
        chat(image(str(picture)), model=model)


def test_a_template_that_leaves_pictures_out(picture: Path) -> None:
    media = ChatMedia(Model())  # type: ignore[arg-type]
    media.take([{"role": "user", "content": [image(str(picture))]}])
    with pytest.raises(LibraryError, match="shows 0 of 1"):
        media.prompt("nothing")


def test_handlers_name_the_projector() -> None:
    assert engine_options({"chat_handler": Llava15ChatHandler(clip_model_path="p.gguf")}).mmproj == "p.gguf"
    assert engine_options({"mmproj": Path("q.gguf"), "image_max_tokens": 9}).mmproj == "q.gguf"
    assert engine_options({}).mmproj is None and not engine_options({}).mmproj_auto
    here = engine_options({"mmproj_offload": False, "mmproj_device": "CUDA1"})
    assert (here.mmproj_offload, here.mmproj_device) == (False, "CUDA1") and engine_options({}).mmproj_offload
    with pytest.raises(LibraryError, match="chat_handler"):
        engine_options({"chat_handler": object()})  # type: ignore[typeddict-item]
    for name in ("Llava16", "Moondream", "NanoLlava", "Obsidian", "Llama3VisionAlpha", "MiniCPMv26", "Qwen25VL"):
        assert issubclass(getattr(chat_handlers, f"{name}ChatHandler"), MTMDChatHandler)
