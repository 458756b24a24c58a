"""Pictures and sounds in requests: every API's form of them, errors, limits, and hostile bodies."""

from __future__ import annotations

import asyncio
import functools
import re
import ssl
import threading
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeEngine, FakeMedia, client, get, post, run, send
from media_files import base64_of, data_uri, png, wav

from llamado import outgoing
from llamado.http.bodies import MAX_BODY
from llamado.media.chunks import Piece
from llamado.media.media import Media, MediaKind
from llamado.server.media import loader as media_loader
from llamado.server.media.loader import MediaBudget, MediaHold
from llamado.server.media.parts import MOST_MEDIA

PICTURE = png()  # three rows: three tokens
RED, BLUE = png(color=(255, 0, 0)), png(color=(0, 0, 255))
SOUND = wav(500)  # five tokens


def image(data: bytes = PICTURE) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_uri(data)}}


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def shown(engine: FakeEngine) -> str:
    """Return the last prompt as text, with a `*` for each media token."""
    request = engine.requests[-1]
    inside = {i for span in request.media for i in range(span.start, span.stop)}
    assert inside == {i for i, token in enumerate(request.prompt) if token < 0}
    for span in request.media:
        assert request.prompt[span.start : span.stop] == span.chunk.token_ids().tolist()
    return "".join("*" if token < 0 else chr(token) for token in request.prompt)


def ask(path: str, body: dict[str, Any], **options: Any) -> tuple[str, Any]:
    """Return the prompt that the engine got, and the answer."""
    engine = FakeEngine()
    status, answer = post(path, body, engine, media=FakeMedia(), **options)
    assert status == 200, answer
    return shown(engine), answer


def refusal(path: str, body: dict[str, Any], **options: Any) -> str:
    status, answer = post(path, body, media=FakeMedia(), **options)
    assert status == 400, answer
    error = answer["error"]
    return error if isinstance(error, str) else str(error["message"])


# -- forms of the APIs -------------------------------------------------------------------------------------------------


def test_parts_of_a_chat_stand_where_they_were() -> None:
    body = user(words("a"), image(), words("b"), words("c"), image(), image())
    prompt, answer = ask("/v1/chat/completions", body)
    # Line feeds are between texts only, as in llama-server.
    assert prompt == "<user>a[***]b\nc[***][***]</><assistant>"
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["usage"]["total_tokens"] == len(prompt) + answer["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": data_uri(PICTURE)},
        {"type": "image_url", "image_url": {"url": data_uri(PICTURE), "detail": "low"}},
        {"type": "image_url", "image_url": {"url": base64_of(PICTURE)}},
        {"type": "image_url", "image_url": {"url": base64_of(PICTURE).rstrip("=")}},
        {"type": "image_url", "image_url": {"url": re.sub("(.{20})", r"\1\n", base64_of(PICTURE))}},
        {"type": "image_url", "image_url": {"url": data_uri(PICTURE, "image/jpeg")}},
    ],
)
def test_spellings_of_a_picture(part: dict[str, Any]) -> None:
    assert ask("/v1/chat/completions", user(part))[0] == "<user>[***]</><assistant>"


def test_sounds() -> None:
    part = {"type": "input_audio", "input_audio": {"data": base64_of(SOUND), "format": "wav"}}
    assert ask("/v1/chat/completions", user(words("what?"), part))[0] == "<user>what?[*****]</><assistant>"


def test_equal_pictures_have_equal_tokens() -> None:
    """Prompts are compared by tokens, so prefix reuse and caches recognize pictures."""
    engine = FakeEngine()

    async def work() -> None:
        async with client(engine, media=FakeMedia()) as http:
            for data in (RED, BLUE, RED):
                await http.post("/v1/chat/completions", json=user(image(data)))

    run(work())
    first, other, again = (request.prompt for request in engine.requests)
    assert first == again != other and len(first) == len(other)


def test_messages_api() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(PICTURE)}
    document = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "D"}}
    content = [{"type": "image", "source": source}, words("what?"), document]
    body: dict[str, Any] = {"max_tokens": 9, "messages": [{"role": "user", "content": content}]}
    prompt, answer = ask("/v1/messages", body)
    assert prompt == "<user>[***]what?\nT\nD</><assistant>"
    assert answer["usage"]["input_tokens"] == len(prompt)
    status, counted = post("/v1/messages/count_tokens", body, media=FakeMedia())
    assert (status, counted["input_tokens"]) == (200, len(prompt))


def test_results_of_tools_have_pictures() -> None:
    source = {"type": "base64", "data": base64_of(PICTURE)}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [words("see"), {"type": "image", "source": source}]}
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    messages = [
        {"role": "user", "content": "q"}, {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]  # fmt: skip
    assert "see[***]" in ask("/v1/messages", {"messages": messages})[0]


@pytest.mark.parametrize(
    ("block", "error"),
    [
        ({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "x"}}, "PDF"),
        ({"type": "document", "source": {"type": "url", "url": "https://x/y.pdf"}}, "PDF"),
        ({"type": "document", "source": {"type": "file", "file_id": "f"}}, "keeps no files"),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "keeps no files"),
    ],
)
def test_blocks_that_the_messages_api_refuses(block: dict[str, Any], error: str) -> None:
    assert error in refusal("/v1/messages", {"messages": [{"role": "user", "content": [block]}]})


def test_responses_api() -> None:
    sound = {"type": "input_audio", "input_audio": {"data": base64_of(SOUND), "format": "wav"}}
    content = [
        {"type": "input_text", "text": "what?"},
        {"type": "input_image", "image_url": data_uri(PICTURE)},
        sound,
    ]
    prompt, answer = ask("/v1/responses", {"input": [{"role": "user", "content": content}]})
    assert prompt == "<user>what?[***][*****]</><assistant>"
    assert answer["usage"]["input_tokens"] == len(prompt)


def test_ollama() -> None:
    picture = base64_of(PICTURE)
    message = {"role": "user", "content": "what?", "images": [picture, picture]}
    prompt, answer = ask("/api/chat", {"model": "m", "stream": False, "messages": [message]})
    assert prompt == "<user>[***][***]what?</><assistant>" and answer["prompt_eval_count"] == len(prompt)
    body = {"model": "m", "stream": False, "prompt": "what?", "images": [picture]}
    prompt, answer = ask("/api/generate", body)
    assert prompt == "<user>[***]what?</><assistant>" and "context" not in answer
    assert ask("/api/generate", {**body, "raw": True})[0] == "[***]what?"
    assert "images cannot follow" in refusal("/api/generate", {**body, "template": "{{.Prompt}}", "context": [1]})
    assert "cannot follow" in refusal("/api/generate", {**body, "context": [1]})
    assert "array of base64" in refusal("/api/chat", {"model": "m", "messages": [{"role": "user", "images": [1]}]})


def marked(*data: bytes, text: str = "<x>", marker: str = "<x>") -> dict[str, Any]:
    return {"prompt": {"prompt_string": text, "multimodal_data": [base64_of(one) for one in data]}}


@pytest.mark.parametrize("path", ["/completion", "/completions", "/v1/completions"])
def test_prompts_with_multimodal_data(path: str) -> None:
    body = marked(PICTURE, SOUND, text="a<x>b<x>")
    prompt, answer = ask(path, body)
    assert prompt == "a[***]b[*****]"
    if path != "/v1/completions":
        assert answer["prompt"] == "a[<x>]b[<x>]" and answer["tokens_evaluated"] == len(prompt)
    several = {"prompt": [body["prompt"], "text", marked(text="no media")["prompt"]]}
    engine = FakeEngine()
    assert post(path, several, engine, media=FakeMedia())[0] == 200
    assert sorted(len(request.media) for request in engine.requests) == [0, 0, 2]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (marked(PICTURE, text="no marker"), "markers in text (0) does not match media (1)"),
        (marked(PICTURE, text="<x><x>"), "markers in text (2) does not match media (1)"),
        (marked(text="<x>"), "markers in text (1) does not match media (0)"),
        ({"prompt": {"prompt_string": "x", "multimodal_data": "x"}}, "array of base64 strings"),
        ({"prompt": {"prompt_string": "x", "multimodal_data": [1]}}, "array of base64 strings"),
        ({"prompt": {"prompt_string": ["x"], "multimodal_data": ["x"]}}, "must be a string"),
    ],
)
def test_malformed_multimodal_data(body: dict[str, Any], error: str) -> None:
    assert error in refusal("/completion", body)


def test_prompts_without_a_projector() -> None:
    assert "does not support multimodal" in post("/completion", marked(PICTURE))[1]["error"]["message"]


def test_rendering_shows_the_servers_marker() -> None:
    """A client can send what `/apply-template` returns to `/completion`, with the media in the same order."""
    engine = FakeEngine()

    async def work() -> str:
        async with client(engine, media=FakeMedia()) as http:
            marker = (await http.get("/props")).json()["media_marker"]
            rendered = (await http.post("/apply-template", json=user(words("a"), image()))).json()["prompt"]
            assert rendered == f"<user>a{marker}</><assistant>"
            body = {"prompt": {"prompt_string": rendered, "multimodal_data": [base64_of(PICTURE)]}}
            assert (await http.post("/completion", json=body)).status_code == 200
            return str(marker)

    assert run(work()) == "<x>"
    marker = get("/props")[1]["media_marker"]
    assert re.fullmatch(r"<__media_\w{32}__>", marker) and get("/props")[1]["media_marker"] == marker
    assert shown(engine) == "<user>a[***]</><assistant>"


def test_embeddings_and_infill_take_no_pictures() -> None:
    """Both endpoints read text only; `/infill` of llama-server does, too."""
    body = {"input_prefix": {"prompt_string": "x", "multimodal_data": [base64_of(PICTURE)]}, "input_suffix": ""}
    assert "type must be" in refusal("/infill", body)


# -- properties --------------------------------------------------------------------------------------------------------


def test_modalities() -> None:
    for kinds, found in (((), ["text"]), ((MediaKind.IMAGE,), ["text", "image"])):
        encoders = FakeMedia(*kinds) if kinds else None
        entry = get("/v1/models", media=encoders)[1]
        assert entry["data"][0]["architecture"]["input_modalities"] == found
        assert ("multimodal" in entry["models"][0]["capabilities"]) is bool(kinds)
        props = get("/props", media=encoders)[1]
        assert props["modalities"] == {"vision": bool(kinds), "video": False, "audio": False}
    assert get("/v1/models", media=FakeMedia())[1]["data"][0]["architecture"]["input_modalities"] == [
        "text", "image", "audio",
    ]  # fmt: skip
    told = post("/api/show", {"model": "m"}, media=FakeMedia())[1]["capabilities"]
    assert {"vision", "audio"} <= {*told} and "vision" not in post("/api/show", {"model": "m"})[1]["capabilities"]


# -- hostile and broken requests ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["image_url", "input_audio", "input_video", "video_url"])
def test_without_a_projector(name: str) -> None:
    status, answer = post("/v1/chat/completions", user({"type": name, name: {"url": "x"}}))
    word = {"image_url": "image", "input_audio": "audio"}.get(name, "video")
    assert status == 400
    assert answer["error"]["message"] == (
        f"{word} input is not supported - hint: if this is unexpected, you may need to provide the mmproj"
    )


def test_a_kind_that_the_projector_lacks() -> None:
    encoders = FakeMedia(MediaKind.IMAGE)
    part = {"type": "input_audio", "input_audio": {"data": base64_of(SOUND)}}
    assert post("/v1/chat/completions", user(part), media=encoders)[0] == 400
    # A sound that pretends to be a picture.
    status, answer = post("/v1/chat/completions", user(image(SOUND)), media=encoders)
    assert status == 400 and answer["error"]["message"].startswith("audio input is not supported")


@pytest.mark.parametrize(
    ("part", "error"),
    [
        ({"type": "image_url"}, "'image_url' must be"),
        ({"type": "image_url", "image_url": {}}, "'image_url' must be"),
        ({"type": "image_url", "image_url": {"url": 1}}, "'image_url' must be"),
        ({"type": "image_url", "image_url": ["x"]}, "'image_url' must be"),
        ({"type": "image_url", "image_url": {"url": ""}}, "'image_url' must be"),
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, "'input_audio' must be"),
        ({"type": "image_url", "image_url": "!!!!"}, "Invalid base64 value"),
        ({"type": "image_url", "image_url": "AAAAA"}, "Invalid base64 value"),
        ({"type": "image_url", "image_url": "AA======"}, "Invalid base64 value"),
        ({"type": "image_url", "image_url": "===="}, "Invalid base64 value"),
        ({"type": "image_url", "image_url": "AAA\u00e9"}, "Invalid base64 value"),
        ({"type": "image_url", "image_url": "data:image/png;base64"}, "Invalid uri-encoded base64 value"),
        ({"type": "image_url", "image_url": "data:text/html;base64,AAAA"}, "Invalid uri format: data:text/html"),
        ({"type": "image_url", "image_url": "data:image/png,AAAA"}, "uri must be base64 encoded"),
        ({"type": "image_url", "image_url": data_uri(b"not a picture at all")}, "picture"),
        ({"type": "image_url", "image_url": data_uri(PICTURE[:30])}, "picture"),
        ({"type": "media_marker", "text": "<__media__>"}, "unsupported content[].type"),
        ({"type": "text"}, "'text'"),
    ],
)
def test_malformed_parts(part: dict[str, Any], error: str) -> None:
    assert error in refusal("/v1/chat/completions", user(words("x"), part))


@pytest.mark.parametrize("n", [MOST_MEDIA + 1, 10_000])
def test_too_many_pictures(n: int) -> None:
    encoders = FakeMedia()
    picture = {"type": "image_url", "image_url": base64_of(png(1, 1))}
    status, answer = post("/v1/chat/completions", user(*[picture] * n), media=encoders)
    assert status == 400 and f"more than {MOST_MEDIA} pictures" in answer["error"]["message"]
    body = {"prompt": [marked(text="")["prompt"] | {"multimodal_data": ["AAAA"] * (n // 2 + 1)}] * 2}
    status, answer = post("/completion", body, media=encoders)
    assert status == 400 and f"more than {MOST_MEDIA} pictures" in answer["error"]["message"]
    assert not encoders.prepared  # refused before anything is decoded


def test_text_is_never_a_marker() -> None:
    """A client cannot write the marker: neither llama.cpp's nor the server's counts as a picture in a chat."""
    engine = FakeEngine()
    texts = ["<__media__>", "<x>", "<__media_0123__>"]
    body = user(*(words(text) for text in texts), image(), words("<x>"))
    status, _ = post("/v1/chat/completions", body, engine, media=FakeMedia())
    assert status == 200
    assert shown(engine) == "<user>" + "\n".join(texts) + "[***]<x></><assistant>"
    assert ask("/v1/chat/completions", user(words("<x>")))[0] == "<user><x></><assistant>"


def test_a_template_that_leaves_pictures_out() -> None:
    error = refusal("/v1/chat/completions", user(image()), source="{{ messages[0].role }}")
    assert "the chat template shows 0 of 1 pictures" in error


def test_pictures_that_exceed_the_context() -> None:
    """The rest of them is not prepared."""
    encoders = FakeMedia()
    status, answer = post("/v1/chat/completions", user(*[image(png(1, 3000))] * 5), media=encoders)
    assert (status, answer["error"]["type"]) == (400, "exceed_context_size_error")
    assert len(encoders.prepared) == 2


def test_bodies_grow_with_a_projector_only() -> None:
    body = b'{"prompt": "%s"}' % (b"x" * MAX_BODY)
    assert send("/completion", body).status_code == 413
    response = send("/completion", body, media=FakeMedia())
    assert response.status_code == 400 and "exceeds the available context" in response.text


def test_the_log_has_no_data(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)
    ask("/v1/chat/completions", user(image()))
    refusal("/v1/chat/completions", user(image(b"x" * 300)))
    assert base64_of(PICTURE)[:40] not in caplog.text and base64_of(b"x" * 300)[:80] not in caplog.text


def test_memory_of_prepared_media_is_returned() -> None:
    engine = FakeEngine()
    holds: list[MediaHold] = []
    made = media_loader.MediaLoader.hold

    def hold(self: media_loader.MediaLoader) -> MediaHold:
        holds.append(made(self))
        return holds[-1]

    async def work() -> None:
        async with client(engine, media=FakeMedia()) as http:
            monkey = pytest.MonkeyPatch()
            monkey.setattr(media_loader.MediaLoader, "hold", hold)
            try:
                await http.post("/v1/chat/completions", json=user(image()))
                await http.post("/v1/chat/completions", json=user(image(), image(b"broken")))
                await http.post("/completion", json=marked(PICTURE, text=""))
                await http.post("/v1/chat/completions/input_tokens", json=user(image()))
                engine.fail = RuntimeError("x")
                await http.post("/v1/chat/completions", json={**user(image()), "stream": True})
            finally:
                monkey.undo()

    run(work())
    assert len(holds) == 5 and holds[0]._budget.held == 0


def test_memory_of_prepared_media_is_limited() -> None:
    budget = MediaBudget(100)
    budget.reserve(150)  # one request alone is always served
    with pytest.raises(Exception, match="too many pictures and sounds at once"):
        budget.reserve(1)


def test_pictures_are_decoded_in_threads_of_their_own() -> None:
    names: list[str] = []
    encoders = FakeMedia()
    prepare = encoders.prepare

    def named(media: Media) -> list[Piece]:
        names.append(threading.current_thread().name)
        return prepare(media)

    encoders.prepare = named  # type: ignore[method-assign]
    assert post("/v1/chat/completions", user(image()), media=encoders)[0] == 200
    assert names and all(name.startswith("llamado-media") for name in names)


# -- files and URLs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "media"
    (root / "sub").mkdir(parents=True)
    (root / "a b.png").write_bytes(PICTURE)
    (root / "sub" / "c.png").write_bytes(PICTURE)
    (tmp_path / "secret.png").write_bytes(PICTURE)
    (root / "inside.png").symlink_to(root / "sub" / "c.png")
    (root / "out.png").symlink_to(tmp_path / "secret.png")
    (root / "up").symlink_to(tmp_path)
    return root


def at(url: str) -> dict[str, Any]:
    return user({"type": "image_url", "image_url": {"url": url}})


@pytest.mark.parametrize("name", ["a b.png", "sub/c.png", "inside.png"])
def test_files_below_the_media_path(folder: Path, name: str) -> None:
    prompt, _ = ask("/v1/chat/completions", at(f"file://{name}"), media_path=str(folder))
    assert prompt == "<user>[***]</><assistant>"


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("../secret.png", "not allowed"),
        ("sub/../../secret.png", "not allowed"),
        ("/etc/passwd", "not allowed"),
        ("sub//c.png", "not allowed"),
        ("", "not allowed"),
        (".", "not allowed"),
        ("sub\\c.png", "not allowed"),
        ("c:x.png", "not allowed"),
        ("a\0.png", "not allowed"),
        ("out.png", "leads out"),
        ("up/secret.png", "leads out"),
        ("none.png", "does not exist"),
        ("sub", "not a file"),
        ("x" * 5000, "cannot be opened"),
    ],
)
def test_files_that_are_refused(folder: Path, name: str, error: str) -> None:
    assert error in refusal("/v1/chat/completions", at(f"file://{name}"), media_path=str(folder))


def test_files_are_limited(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_loader, "MOST_FILE_BYTES", len(PICTURE) - 1)
    assert "more than" in refusal("/v1/chat/completions", at("file://sub/c.png"), media_path=str(folder))


def test_files_and_urls_need_a_flag() -> None:
    assert "--media-path" in refusal("/v1/chat/completions", at("file://a.png"))
    for url in ("http://example.com/a.png", "HTTPS://example.com/a.png"):
        assert "--media-url" in refusal("/v1/chat/completions", at(url))


@pytest.fixture(autouse=True)
def certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the system's certificates once, not for each server, which takes 50 ms."""
    monkeypatch.setattr("llamado.outgoing.ssl.create_default_context", _default_context)


_default_context = functools.cache(ssl.create_default_context)

_NOT_PUBLIC = [
    "127.0.0.1:1", "localhost", "[::1]", "0.0.0.0", "10.0.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[fe80::1]", "[fd00::1]", "[fec0::1]", "[ff02::1]",
    "224.0.0.1", "240.0.0.1",
]  # fmt: skip


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        *((f"http://{host}/a.png", "is not a public address") for host in _NOT_PUBLIC),
        ("http://user:password@8.8.8.8/", "user names and passwords"),
        ("http://", "no host"),
        ("http://[", "image: "),
        # The system's resolver refuses these, or reads them as an address of this machine.
        ("http://2130706433/", "address"),
        ("http://0x7f.1/", "address"),
        ("http://exa mple/", "image: "),
        ("http://\u0661\u0662\u0667.0.0.1/", "image: "),
    ],
)
def test_addresses_that_are_never_fetched(url: str, reason: str) -> None:
    error = refusal("/v1/chat/completions", at(url), media_url=True)
    assert error.startswith("Failed to download image: ") and reason in error


def test_pictures_from_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The picture comes from a server of this machine, whose address counts as public in the test."""
    allowed = outgoing.is_public
    monkeypatch.setattr(outgoing, "is_public", lambda address: address == "127.0.0.1" or allowed(address))
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        asked.append(head)
        path = head.split()[1]
        if path == b"/moved":
            writer.write(b"HTTP/1.1 302 Found\r\nlocation: /a.png\r\ncontent-length: 0\r\n\r\n")
        elif path == b"/loop":
            writer.write(b"HTTP/1.1 302 Found\r\nlocation: /loop\r\ncontent-length: 0\r\n\r\n")
        elif path == b"/away":
            writer.write(b"HTTP/1.1 302 Found\r\nlocation: file:///etc/passwd\r\ncontent-length: 0\r\n\r\n")
        elif path == b"/inside":
            writer.write(b"HTTP/1.1 302 Found\r\nlocation: http://10.0.0.1/\r\ncontent-length: 0\r\n\r\n")
        elif path == b"/large":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 99999999\r\n\r\n")
        elif path == b"/none":
            writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(PICTURE) + PICTURE)
        await writer.drain()
        writer.close()

    async def work() -> dict[str, tuple[int, str]]:
        found = {}
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with client(media=FakeMedia(), media_url=True) as http:
                for path in ("a.png", "moved", "loop", "away", "inside", "large", "none"):
                    answer = await http.post("/v1/chat/completions", json=at(f"http://localhost:{port}/{path}"))
                    found[path] = answer.status_code, answer.text
            assert b"host: localhost:%d" % port in asked[0].lower()
        return found

    found = run(work())
    assert found["a.png"][0] == found["moved"][0] == 200
    assert sum(head.startswith(b"GET /loop") for head in asked) == 4
    errors = {
        "loop": "redirects", "inside": "not a public address", "away": "unsupported URL scheme", "large": "more than",
        "none": "404",
    }  # fmt: skip
    for path, error in errors.items():
        assert found[path][0] == 400 and error in found[path][1], found[path]


# -- transcriptions ----------------------------------------------------------------------------------------------------


def transcribe(
    fields: dict[str, str], path: str = "/v1/audio/transcriptions", *, sound: bytes | None = SOUND, **options: Any
) -> tuple[Any, FakeEngine]:
    engine = FakeEngine("Good morning.")

    async def work() -> Any:
        async with client(engine, media=FakeMedia(), **options) as http:
            files = {} if sound is None else {"file": ("a.wav", sound, "audio/wav")}
            return await http.post(path, data={"model": "m", **fields}, files=files)

    return run(work()), engine


def test_transcription() -> None:
    response, engine = transcribe({})
    assert shown(engine) == "<user>Transcribe audio to text[*****]</><assistant>"
    body = response.json()
    assert body["type"] == "transcript.text.done" and body["text"] == "Good morning."
    assert body["usage"]["input_tokens"] == len(engine.requests[0].prompt)
    assert body["usage"]["output_tokens"] == len("Good morning.")


def test_fields_of_a_transcription() -> None:
    fields = {"language": "de", "prompt": "Write it down.", "temperature": "0.5", "seed": "7", "max_tokens": "4"}
    response, engine = transcribe(fields, "/audio/transcriptions")
    assert shown(engine) == "<user>Write it down. (language: de)[*****]</><assistant>"
    params = engine.requests[0].params
    assert (params.sampling.temperature, params.sampling.seed, params.n_predict) == (0.5, 7, 4)
    assert response.json()["text"] == "Good"


def test_translation() -> None:
    _, engine = transcribe({}, "/v1/audio/translations")
    assert shown(engine) == "<user>Translate the audio to English text[*****]</><assistant>"


def test_lfm2_has_a_prompt_of_its_own() -> None:
    source = "{# <|tool_list_start|> #}{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    _, engine = transcribe({}, source=source)
    assert shown(engine).startswith("<system>Perform ASR.</><user>[*****]</>")


@pytest.mark.parametrize(
    ("form", "kind", "text"),
    [
        ("text", "text/plain; charset=utf-8", "Good morning.\n"),
        ("srt", "text/plain; charset=utf-8", "1\n00:00:00,000 --> 00:00:00,031\nGood morning.\n\n"),
        ("vtt", "text/vtt; charset=utf-8", "WEBVTT\n\n00:00:00.000 --> 00:00:00.031\nGood morning.\n\n"),
    ],
)
def test_texts_of_a_transcription(form: str, kind: str, text: str) -> None:
    response, _ = transcribe({"response_format": form})
    assert (response.headers["content-type"], response.text) == (kind, text)


def test_verbose_transcription() -> None:
    body = transcribe({"response_format": "verbose_json", "language": "en"})[0].json()
    assert (body["task"], body["language"], body["duration"], body["text"]) == (
        "transcribe", "en", 0.031, "Good morning.",
    )  # fmt: skip
    (segment,) = body["segments"]
    assert (segment["start"], segment["end"], segment["text"]) == (0.0, 0.031, "Good morning.")
    assert segment["avg_logprob"] == pytest.approx(-0.6931, abs=1e-3)
    assert body["usage"] == {"type": "duration", "seconds": 1}


def test_streamed_transcription() -> None:
    response, _ = transcribe({"stream": "true"})
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[0] == '{"type":"transcript.text.delta","delta":"G"}'
    assert '"type":"transcript.text.done","text":"Good morning."' in lines[-2] and lines[-1] == "[DONE]"


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"response_format": "xml"}, "response_format must be"),
        ({"response_format": "srt", "stream": "true"}, "cannot be streamed"),
        ({"temperature": "hot"}, "Field 'temperature'"),
        ({"temperature": "nan"}, "Field 'temperature'"),
        ({f"f{i}": "x" for i in range(100)}, "the form cannot be read"),
        ({"prompt": "x" * (2 << 20)}, "the form cannot be read"),
    ],
)
def test_malformed_transcriptions(fields: dict[str, str], error: str) -> None:
    response, _ = transcribe(fields)
    assert response.status_code == 400 and error in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "kind", "error"),
    [
        (b"{}", "application/json", "multipart/form-data"),
        (b"", "multipart/form-data", "the form cannot be read"),
        (b"x", "multipart/form-data; boundary=b", "the form cannot be read"),
        (b"--b\r\n\r\n", "multipart/form-data; boundary=b", "the form cannot be read"),
        (b"--b--\r\n", "multipart/form-data; boundary=b", "No input file found"),
        (
            b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nx\r\n--b\r\n'
            b'Content-Disposition: form-data; name="f2"; filename="a"\r\n\r\nx\r\n--b--\r\n',
            "multipart/form-data; boundary=b",
            "the form cannot be read",
        ),
    ],
)
def test_malformed_forms(body: bytes, kind: str, error: str) -> None:
    async def work() -> Any:
        async with client(media=FakeMedia()) as http:
            return await http.post("/v1/audio/transcriptions", content=body, headers={"content-type": kind})

    response = run(work())
    assert response.status_code == 400 and error in response.json()["error"]["message"], response.text


def test_transcriptions_need_an_audio_encoder() -> None:
    async def work() -> Any:
        async with client(media=FakeMedia(MediaKind.IMAGE)) as http:
            return await http.post("/v1/audio/transcriptions", files={"file": SOUND})

    response = run(work())
    assert (response.status_code, response.json()["error"]["type"]) == (501, "not_supported_error")
    response, _ = transcribe({}, sound=PICTURE)
    assert response.status_code == 200  # what the file is decides, as in llama-server


def test_a_transcription_without_a_file() -> None:
    boundary = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--b--\r\n'
    kind = {"content-type": "multipart/form-data; boundary=b"}

    async def work() -> Any:
        async with client(media=FakeMedia()) as http:
            return await http.post("/v1/audio/transcriptions", content=boundary, headers=kind)

    assert "No input file found" in run(work()).text
