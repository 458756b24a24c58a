"""Pictures and sounds in the chat view, with stand-ins for the server's modalities and answers."""

from __future__ import annotations

import base64
import io
import json
import math
import struct
import wave
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsing import assert_accessible, choose_action, open_view, send, serving, take_picture, until
from PIL import Image
from playwright.sync_api import BrowserContext, FileChooser, Locator, Page, Route, expect
from projectors import spec
from projectors.siglip import GEMMA3, N
from scripted import ScriptedEngine, scripted_server

pytestmark = pytest.mark.browser

TOKENS_OF_PICTURE = 260


def picture(size: tuple[int, int] = (60, 40), format: str = "PNG", **options: Any) -> bytes:
    """Return a picture whose left half is red and whose right half is blue."""
    image = Image.new("RGB", size, (200, 20, 20))
    image.paste((20, 20, 200), (size[0] // 2, 0, *size))
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def noise(size: tuple[int, int], format: str, seed: int = 1) -> bytes:
    """Return a picture that compresses badly."""
    values = bytearray()
    while len(values) < 3 * size[0] * size[1]:
        seed = (seed * 6364136223846793005 + 1442695040888963407) % 2**64
        values += struct.pack("<Q", seed ^ seed >> 29)
    file = io.BytesIO()
    Image.frombytes("RGB", size, bytes(values[: 3 * size[0] * size[1]])).save(file, format)
    return file.getvalue()


def sound(seconds: float = 0.1) -> bytes:
    """Return a tone as WAV."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, 16_000, 0, "NONE", ""))
        tone = [round(9000 * math.sin(2 * math.pi * 440 * i / 16_000)) for i in range(int(16_000 * seconds))]
        out.writeframes(struct.pack(f"<{len(tone)}h", *tone))
    return file.getvalue()


def payload(name: str, content: bytes, type: str = "") -> Any:
    return {"name": name, "mimeType": type, "buffer": content}


def _body(route: Route) -> dict[str, Any]:
    body: dict[str, Any] | None = route.request.post_data_json
    assert body is not None
    return body


class MediaServer:
    """Stand-in for a server with a model for pictures and sounds: records the requests for answers."""

    def __init__(self, page: Page, **modalities: bool) -> None:
        self.requests: list[dict[str, Any]] = []
        self.modalities = {"vision": True, "audio": True, "video": False} | modalities
        self.props: dict[str, Any] = {}
        self.answer = "A red and a blue half."
        page.route("**/props*", self._props)
        page.route("**/v1/chat/completions", self._complete)
        page.route("**/v1/chat/completions/input_tokens", self._count)

    def _props(self, route: Route) -> None:
        self.props = self.props or route.fetch().json()
        route.fulfill(json=self.props | {"modalities": self.modalities})

    def _count(self, route: Route) -> None:
        (message,) = _body(route)["messages"]
        n_media = sum(part["type"] != "text" for part in message["content"])
        route.fulfill(json={"object": "response.input_tokens", "input_tokens": 12 + TOKENS_OF_PICTURE * n_media})

    def _complete(self, route: Route) -> None:
        self.requests.append(_body(route))
        timings = {"cache_n": 0, "prompt_n": 280, "predicted_n": 7, "predicted_per_second": 10.0}
        chunks = [
            {"choices": [{"delta": {"content": self.answer}, "finish_reason": None}]},
            {"choices": [{"delta": {}, "finish_reason": "stop"}], "timings": timings},
        ]
        body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        route.fulfill(content_type="text/event-stream", body=body)

    @property
    def content(self) -> Any:
        """Content of the last user message."""
        return [one for one in self.requests[-1]["messages"] if one["role"] == "user"][-1]["content"]


@pytest.fixture
def address() -> Iterator[str]:
    with scripted_server(ScriptedEngine()) as found:
        yield found


@pytest.fixture
def server(page: Page) -> MediaServer:
    return MediaServer(page)


@pytest.fixture
def chat(page: Page, server: MediaServer, address: str) -> Page:
    """A page with the chat open, whose model accepts pictures and sounds."""
    page.goto(address)
    page.get_by_role("button", name="Record sound").wait_for()
    return page


def attach(page: Page, *files: Any) -> None:
    page.get_by_label("Pictures or sounds to attach").set_input_files(files)


def drafts(page: Page) -> Locator:
    return page.locator(".composer .media")


def sent(page: Page) -> Locator:
    return page.locator("article.user .media")


def answered(page: Page, n: int = 1) -> None:
    expect(page.locator("article.assistant .markdown")).to_have_count(n)
    page.get_by_role("button", name="Send", exact=True).wait_for()


def is_loaded(image: Locator) -> bool:
    return bool(image.evaluate("(one) => one.complete && one.naturalWidth > 0"))


def uri(content: bytes, type: str = "image/png") -> str:
    return f"data:{type};base64,{base64.b64encode(content).decode()}"


def test_pictures_and_sounds_are_sent_as_parts_in_order(chat: Page, server: MediaServer) -> None:
    red, tone = picture(), sound()
    attach(chat, payload("red.png", red), payload("tone.wav", tone))
    chat.get_by_label("Files to attach").set_input_files(payload("notes.txt", b"seven"))
    expect(drafts(chat)).to_have_count(2)
    expect(drafts(chat).first).to_contain_text(f"{TOKENS_OF_PICTURE} tokens")
    assert_accessible(chat)
    send(chat, "What is it?")
    answered(chat)
    image, audio, file, text = server.content
    assert image == {"type": "image_url", "image_url": {"url": uri(red)}}
    assert audio == {
        "type": "input_audio",
        "input_audio": {"data": base64.b64encode(tone).decode(), "format": "wav"},
    }
    assert file["type"] == "text" and file["text"].startswith("File: notes.txt\n```\nseven\n```")
    assert text == {"type": "text", "text": "What is it?"}
    expect(sent(chat)).to_have_count(2)
    expect(sent(chat).first).to_contain_text(f"{TOKENS_OF_PICTURE} tokens")
    expect(chat.locator("article.assistant .stats")).to_contain_text("prompt 280")
    assert_accessible(chat)

    send(chat, "And now?")  # the earlier picture is part of the request again
    answered(chat, 2)
    first, _, last = server.requests[-1]["messages"]
    assert first["content"][0]["image_url"]["url"] == uri(red) and last["content"] == "And now?"


def test_files_keep_their_order_if_the_first_is_read_slowly(chat: Page, server: MediaServer) -> None:
    """A small text that is attached after a picture does not overtake it."""
    chat.evaluate(
        """() => {
          const read = Blob.prototype.arrayBuffer;
          Blob.prototype.arrayBuffer = async function () {
            if (this.name === "slow.png") await new Promise((done) => setTimeout(done, 500));
            return read.call(this);
          };
        }"""
    )
    attach(chat, payload("slow.png", picture()))
    chat.get_by_label("Files to attach").set_input_files(payload("notes.txt", b"seven"))
    send(chat, "What is it?")
    answered(chat)
    assert [part["type"] for part in server.content] == ["image_url", "text", "text"]
    assert server.content[1]["text"].startswith("File: notes.txt")


def test_a_message_waits_for_its_pictures(chat: Page, server: MediaServer) -> None:
    """Enter follows the choice of a large picture at once."""
    chat.get_by_label("Message", exact=True).fill("What is it?")
    data = base64.b64encode(picture((5000, 4000))).decode()
    chat.evaluate(TRANSFER, ["#message", "paste", "large.png", "image/png", data, []])
    chat.evaluate("() => document.querySelector('.composer').requestSubmit()")
    answered(chat)
    assert [part["type"] for part in server.content] == ["image_url", "text"]


def test_a_picture_alone_is_a_message(chat: Page, server: MediaServer) -> None:
    attach(chat, payload("red.png", picture()))
    expect(drafts(chat)).to_have_count(1)
    chat.get_by_role("button", name="Send", exact=True).click()
    answered(chat)
    assert [part["type"] for part in server.content] == ["image_url"]
    expect(chat.get_by_role("heading", level=1)).to_have_text("red.png")


def test_attachments_survive_reload_and_edit_and_are_deleted_with_the_message(
    chat: Page, server: MediaServer, tmp_path: Path
) -> None:
    red = picture()
    attach(chat, payload("red.png", red))
    expect(drafts(chat)).to_contain_text(f"{TOKENS_OF_PICTURE} tokens")  # they are counted after it is attached
    send(chat, "What is it?")
    answered(chat)
    chat.reload()
    image = sent(chat).locator("img")
    until(chat, lambda: is_loaded(image))

    user = chat.locator("article.user")
    user.hover()
    user.get_by_role("button", name="Edit").click()
    user.get_by_label("Edit the message").fill("Which colors?")
    user.get_by_role("button", name="Send again").click()
    chat.get_by_text("2 of 2").wait_for()
    answered(chat)
    assert server.content == [
        {"type": "image_url", "image_url": {"url": uri(red)}},
        {"type": "text", "text": "Which colors?"},
    ]
    until(chat, lambda: is_loaded(image))

    with chat.expect_download() as download:
        chat.get_by_role("button", name="Export").click()
    file = tmp_path / "chats.json"
    download.value.save_as(file)
    (exported,) = json.loads(file.read_text())["conversations"]
    files = [one["attachments"] for one in exported["messages"] if one["role"] == "user"]
    assert files == [[{"name": "red.png", "tokens": TOKENS_OF_PICTURE, "data": uri(red)}]] * 2

    choose_action(chat, "What is it?", "Delete")
    until(chat, lambda: chat.evaluate(N_STORED) == 0)
    chat.get_by_label("Chat file").set_input_files(file)
    chat.locator(".chats-row a").click()
    until(chat, lambda: is_loaded(image))
    send(chat, "Again")
    answered(chat, 2)
    assert server.requests[-1]["messages"][0]["content"][0]["image_url"]["url"] == uri(red)


N_STORED = """async () => {
  const opened = indexedDB.open("llamado");
  await new Promise((done) => (opened.onsuccess = done));
  const all = opened.result.transaction("messages").objectStore("messages").count();
  await new Promise((done) => (all.onsuccess = done));
  opened.result.close();
  return all.result;
}"""

TRANSFER = """([target, event, name, type, data, text]) => {
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], name, { type }));
  for (const kind of text) transfer.items.add("a1", kind);
  const init = { bubbles: true, cancelable: true };
  const made = event === "paste"
    ? new ClipboardEvent(event, { ...init, clipboardData: transfer })
    : new DragEvent(event, { ...init, dataTransfer: transfer });
  return document.querySelector(target).dispatchEvent(made);
}"""


def give(page: Page, target: str, event: str, name: str, content: bytes, *text: str) -> bool:
    """Dispatch an event with a file; return True if the browser's own action would follow."""
    data = base64.b64encode(content).decode()
    return bool(page.evaluate(TRANSFER, [target, event, name, "image/png", data, list(text)]))


def test_pictures_are_pasted_and_dropped_anywhere(chat: Page) -> None:
    assert not give(chat, "#message", "paste", "image.png", picture(), "text/html")
    expect(drafts(chat)).to_have_count(1)
    # Spreadsheets add a picture of the copied cells, which are text.
    assert give(chat, "#message", "paste", "image.png", picture(), "text/plain", "text/html")
    assert not give(chat, ".messages", "dragover", "photo.png", picture())
    expect(chat.locator(".composer.over")).to_have_count(1)
    assert not give(chat, ".messages", "drop", "photo.png", picture())
    expect(drafts(chat)).to_have_count(2)
    expect(chat.locator(".composer.over")).to_have_count(0)
    chat.get_by_role("button", name="Remove image.png").click()
    expect(drafts(chat)).to_contain_text("photo.png")
    expect(chat.get_by_label("Message", exact=True)).to_be_focused()


def test_the_keyboard_attaches_enlarges_and_removes_a_picture(chat: Page) -> None:
    choosers: list[FileChooser] = []
    chat.on("filechooser", lambda chooser: choosers.append(chooser))  # the browser needs a moment until it reports them
    chat.get_by_role("button", name="Attach", exact=True).focus()
    chat.keyboard.press("Enter")
    menu = chat.get_by_role("group", name="Attach")
    expect(menu.get_by_role("button", name="Pictures or sounds")).to_be_focused()
    assert_accessible(chat)
    chat.keyboard.press("Escape")
    expect(menu).to_have_count(0)
    expect(chat.get_by_role("button", name="Attach", exact=True)).to_be_focused()
    chat.keyboard.press("Enter")
    chat.keyboard.press("Enter")
    until(chat, lambda: bool(choosers))
    assert choosers[0].is_multiple()
    choosers[0].set_files([payload("red.png", picture())])
    expect(drafts(chat)).to_have_count(1)

    thumbnail = chat.get_by_role("button", name="red.png").first
    thumbnail.focus()
    chat.keyboard.press("Enter")
    dialog = chat.get_by_role("dialog", name="red.png")
    until(chat, lambda: is_loaded(dialog.locator("img")))
    assert_accessible(chat)
    chat.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    expect(thumbnail).to_be_focused()
    thumbnail.click()
    with chat.expect_download() as download:
        dialog.get_by_role("link", name="Save").click()
    assert download.value.suggested_filename == "red.png"
    dialog.get_by_role("img").click()
    expect(dialog).to_have_count(0)
    chat.get_by_role("button", name="Remove red.png").press("Enter")
    expect(drafts(chat)).to_have_count(0)


@pytest.mark.parametrize(
    ("kind", "advice"), [("image", "does not accept pictures"), ("audio", "does not accept sounds")]
)
def test_a_model_without_media_is_named_with_what_to_do(page: Page, address: str, kind: str, advice: str) -> None:
    server = MediaServer(page, vision=kind == "audio", audio=kind == "image")
    page.goto(address)
    page.get_by_role("button", name="Attach", exact=True).wait_for()
    file = payload("red.png", picture()) if kind == "image" else payload("tone.wav", sound())
    page.get_by_label("Files to attach").set_input_files(file)
    status = page.locator(".composer-status")
    expect(status).to_contain_text(advice)
    expect(status).to_contain_text("--mmproj")
    expect(drafts(page)).to_have_count(0)
    expect(page.get_by_role("button", name="Record sound")).to_have_count(int(kind == "image"))
    expect(page.get_by_label("Photo to attach")).to_have_count(int(kind == "audio"))
    assert not server.requests


def test_files_that_the_server_rejects_are_not_attached(chat: Page) -> None:
    status = chat.locator(".composer-status")
    for name, content, type, words in (
        ("photo.heic", b"\0\0\0\x18ftypheic" + bytes(20), "image/heic", "the picture is in an unknown format"),
        ("clip.webm", b"\x1aE\xdf\xa3" + bytes(20), "audio/webm", "the sound is in an unknown format"),
        ("cut.png", picture()[:40], "image/png", "damaged"),
        ("data.bin", bytes(range(200, 256)), "", "not a text file"),
    ):
        attach(chat, payload(name, content, type))
        expect(status).to_contain_text(f"{name}: ")
        expect(status).to_contain_text(words)
    expect(drafts(chat)).to_have_count(0)
    # SVG is text: its source becomes part of the prompt, and nothing renders it.
    chat.get_by_label("Files to attach").set_input_files(payload("x.svg", b"<svg onload='x()'/>", "image/svg+xml"))
    expect(chat.locator(".chip")).to_have_text("x.svg")
    expect(status).to_be_empty()


def sent_picture(page: Page, server: MediaServer, content: bytes) -> tuple[Image.Image, bytes]:
    """Send a picture; return what arrives, decoded and as bytes."""
    attach(page, payload("photo", content))
    expect(drafts(page)).to_have_count(1)
    send(page, "?")
    page.get_by_role("button", name="Send", exact=True).wait_for()
    until(page, lambda: bool(server.requests))
    data = base64.b64decode(server.content[0]["image_url"]["url"].partition(",")[2])
    server.requests.clear()
    return Image.open(io.BytesIO(data)), data


def test_only_large_pictures_are_changed(chat: Page, server: MediaServer) -> None:
    small = noise((300, 200), "JPEG")
    assert sent_picture(chat, server, small)[1] == small
    wide, _ = sent_picture(chat, server, picture((5000, 1000), "JPEG"))
    assert wide.size == (4096, 819) and wide.format == "JPEG"
    lossless, _ = sent_picture(chat, server, picture((1000, 5000)))
    assert lossless.size == (819, 4096) and lossless.format == "PNG"
    # The pixels of a photo from a phone may be stored sideways: the scaled copy is upright.
    exif = Image.Exif()
    exif[0x0112] = 6
    turned, _ = sent_picture(chat, server, picture((5000, 1000), "JPEG", exif=exif))
    assert turned.size == (819, 4096) and not turned.getexif()


@pytest.mark.full
def test_pictures_of_many_bytes_become_smaller(chat: Page, server: MediaServer) -> None:
    content = noise((1900, 1500), "PNG")
    assert len(content) > 8_000_000
    found, data = sent_picture(chat, server, content)
    assert len(data) <= 8_000_000 and found.size == (1900, 1500)


def test_a_recording_is_sent_as_wav(chat: Page, server: MediaServer, context: BrowserContext) -> None:
    context.grant_permissions(["microphone"])
    chat.get_by_role("button", name="Record sound").click()
    recorder = chat.get_by_role("group", name="Recording")
    expect(recorder.get_by_role("timer")).to_have_text("0:01 of 4:09")
    assert_accessible(chat)
    chat.keyboard.press("Escape")  # cancels
    expect(recorder).to_have_count(0)
    expect(drafts(chat)).to_have_count(0)

    chat.get_by_role("button", name="Record sound").click()
    expect(recorder.get_by_role("button", name="Done")).to_be_focused()
    expect(recorder.get_by_role("timer")).to_contain_text("0:01")
    chat.keyboard.press("Enter")
    expect(drafts(chat)).to_contain_text("recording 1.wav")
    expect(chat.get_by_label("recording 1.wav", exact=True)).to_have_js_property("error", None)
    send(chat, "What is this?")
    answered(chat)
    part = server.content[0]["input_audio"]
    assert part["format"] == "wav"
    with wave.open(io.BytesIO(base64.b64decode(part["data"]))) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 16_000)
        assert 0.5 < file.getnframes() / 16_000 < 60
        samples = struct.unpack(f"<{file.getnframes()}h", file.readframes(file.getnframes()))
    assert max(samples) > 500  # the fake microphone beeps


def test_without_permission_the_page_says_how_to_allow_the_microphone(chat: Page) -> None:
    chat.get_by_role("button", name="Record sound").click()
    expect(chat.locator(".composer-status")).to_contain_text("does not allow this page to use the microphone")
    expect(chat.get_by_role("group", name="Recording")).to_have_count(0)
    expect(chat.get_by_role("button", name="Record sound")).to_be_enabled()


def test_full_storage_is_explained_and_the_chat_goes_on(
    page: Page, server: MediaServer, context: BrowserContext, address: str
) -> None:
    chat = page
    session = context.new_cdp_session(page)
    # Chromium remembers the free space for a while once it has stored something.
    session.send("Storage.overrideQuotaForOrigin", {"origin": address, "quotaSize": 60_000})
    chat.goto(address)
    send(chat, "An old chat")
    answered(chat)
    chat.get_by_role("link", name="New chat").click()
    attach(chat, payload("noise.png", noise((200, 200), "PNG")))
    expect(drafts(chat)).to_have_count(1)
    send(chat, "What is it?")
    answered(chat)
    notice = chat.locator(".conversation > .notice")
    expect(notice).to_contain_text("storage for this page is full")
    expect(sent(chat)).to_have_count(1)
    session.send("Storage.overrideQuotaForOrigin", {"origin": address})
    choose_action(chat, "An old chat", "Delete")
    expect(notice).to_have_count(0)  # it was stored now
    chat.reload()
    until(chat, lambda: is_loaded(sent(chat).locator("img")))
    answered(chat)


HOSTILE = [
    uri(b"<svg xmlns='http://www.w3.org/2000/svg' onload='pwn()'/>", "image/svg+xml"),
    uri(b"<svg xmlns='http://www.w3.org/2000/svg' onload='pwn()'/>", "image/png"),
    uri(b"<script>pwn()</script>", "text/html"),
    "data:text/html,<script>pwn()</script>",
    "http://192.0.2.1/p.png",
    "javascript:pwn()",
    "file:///etc/passwd",
    "blob:null/x",
    "data:image/png;base64,!!!",
    7,
    None,
    {"x": 1},
    ["data:image/png;base64,"],
]


def test_imported_attachments_are_pictures_and_sounds_only(chat: Page) -> None:
    good = [uri(picture()), uri(sound(), "audio/wav"), uri(picture(), "audio/mpeg")]
    name = 'x" onerror=pwn() \u202egnp.exe'
    rows = [
        {
            "id": "a",
            "parent": None,
            "role": "user",
            "content": "look",
            "attachments": [{"name": name, "data": data} for data in [*HOSTILE, *good]],
        }
    ]
    kept = {
        "format": "llamado-conversations",
        "version": 1,
        "conversations": [{"conversation": {"title": "Hostile", "leaf": "a", "updated": 1}, "messages": rows}],
    }
    chat.evaluate("() => { globalThis.pwn = () => { globalThis.ran = true; }; }")
    chat.get_by_label("Chat file").set_input_files(payload("x.json", json.dumps(kept).encode()))
    chat.get_by_role("link", name="Hostile").click()
    expect(sent(chat)).to_have_count(3)
    expect(sent(chat).locator("img")).to_have_count(2)
    images = sent(chat).locator("img")
    until(chat, lambda: all(is_loaded(image) for image in images.all()))
    sent(chat).locator("button").first.click()
    with chat.expect_download() as download:
        chat.get_by_role("dialog").get_by_role("link", name="Save").click()
    assert download.value.suggested_filename.endswith("gnp.png")
    assert chat.evaluate("globalThis.ran") is None
    sources = chat.locator("img, audio").evaluate_all("(all) => all.map((one) => one.src)")
    assert all(source.startswith("blob:") for source in sources)


def test_chats_of_the_page_of_llama_cpp_are_imported(chat: Page, server: MediaServer) -> None:
    red = picture()
    conv = {
        "type": "session",
        "harness": "llama.cpp",
        "id": "c",
        "name": "From there",
        "lastModified": 5,
        "currNode": "a",
    }
    extra = [
        {"type": "IMAGE", "name": "red.png", "base64Url": uri(red)},
        {"type": "TEXT", "name": "notes.txt", "content": "seven"},
    ]
    messages = [
        {"id": "r", "parent": None, "role": "system", "type": "root", "content": "", "timestamp": 1},
        {"id": "s", "parent": "r", "role": "system", "type": "system", "content": "Be brief.", "timestamp": 2},
        {"id": "q", "parent": "s", "role": "user", "type": "text", "content": "Hi?", "extra": extra, "timestamp": 3},
        {"id": "a", "parent": "q", "role": "assistant", "type": "text", "content": "Hello.", "timestamp": 4},
    ]
    lines = [conv, *({"type": "message", "message": message} for message in messages)]
    text = "\n".join(json.dumps(line) for line in lines)
    chat.get_by_label("Chat file").set_input_files(payload("x.jsonl", text.encode()))
    chat.get_by_role("link", name="From there").click()
    until(chat, lambda: is_loaded(sent(chat).locator("img")))
    send(chat, "And?")
    answered(chat, 2)
    system, question, answer, last = server.requests[-1]["messages"]
    assert (system["content"], answer["content"], last["content"]) == ("Be brief.", "Hello.", "And?")
    assert question["content"][0] == {"type": "image_url", "image_url": {"url": uri(red)}}


def test_a_phone_offers_the_camera(page: Page, address: str) -> None:
    browser = page.context.browser
    assert browser is not None
    context = browser.new_context(
        viewport={"width": 390, "height": 780}, has_touch=True, is_mobile=True, service_workers="block"
    )
    phone = context.new_page()
    MediaServer(phone)
    phone.goto(address)
    choosers: list[FileChooser] = []
    phone.on("filechooser", lambda chooser: choosers.append(chooser))
    phone.get_by_role("button", name="Attach", exact=True).tap()
    phone.get_by_role("button", name="Take a photo").tap()
    until(phone, lambda: bool(choosers))
    assert choosers[0].element.get_attribute("capture") == "environment"
    choosers[0].set_files([payload("photo.jpg", picture(format="JPEG"))])
    expect(drafts(phone)).to_have_count(1)
    assert_accessible(phone)
    assert phone.evaluate("document.documentElement.scrollWidth") <= 390
    context.close()


def test_both_sides_of_a_comparison_get_the_picture(chat: Page, server: MediaServer) -> None:
    open_view(chat, "Compare")
    attach(chat, payload("red.png", picture()))
    expect(drafts(chat)).to_have_count(1)
    send(chat, "What is it?")
    chat.get_by_text("The answers are the same").wait_for()
    assert [one["messages"][0]["content"][0]["type"] for one in server.requests] == ["image_url"] * 2
    expect(sent(chat)).to_have_count(1)
    assert_accessible(chat)


@pytest.mark.full
def test_screenshot_of_a_chat_about_a_picture(chat: Page, server: MediaServer) -> None:
    y, x = np.mgrid[:240, :320]
    sky = np.stack([90 + y // 3, 150 + y // 4, 235 - y // 6], axis=2)
    sky[(x - 230) ** 2 + (y - 70) ** 2 < 34**2] = (255, 214, 90)
    sky[y > 170 + 18 * np.sin(x / 40)] = (60, 120, 70)
    out = io.BytesIO()
    Image.fromarray(sky.astype(np.uint8)).save(out, "PNG")
    server.answer = (
        "A green hill under a blue sky, with a round yellow sun to the right of the middle. There are no clouds, no "
        "people and no buildings."
    )
    attach(chat, payload("hill.png", out.getvalue(), "image/png"))
    send(chat, "What is in the picture?")
    answered(chat)
    chat.wait_for_timeout(400)
    take_picture(chat, "picture")


@pytest.mark.full
def test_a_chat_about_a_picture_with_a_model(page: Page, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The follow-up computes only its own tokens."""
    folder = tmp_path_factory.mktemp("gemma3")
    width = 640
    tensors = {**GEMMA3.tensors, "mm.input_projection.weight": (width, N)}
    projector = spec.write(replace(GEMMA3, tensors=tensors, n_embd=width), folder / "mmproj.gguf")
    flags = "-m", "gemma3", "--mmproj", str(projector), "-c", "4096", "--chat-template", "gemma"
    with serving(folder, *flags) as running:
        page.goto(running)
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("max_tokens", exact=True).fill("8")
        page.get_by_label("max_tokens", exact=True).blur()
        page.get_by_role("button", name="Close settings").click()
        attach(page, payload("a.png", picture((80, 60)), "image/png"))
        for n, question in enumerate(("What is it?", "And its color?"), 1):
            send(page, question)
            expect(page.locator(".stats:not(.streaming)")).to_have_count(n, timeout=60_000)
        page.reload()
        expect(page.locator("article.user .media")).to_have_count(1)
        assert "cache" in page.locator(".stats").last.inner_text().lower()
