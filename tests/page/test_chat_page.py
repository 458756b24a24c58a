"""The chat view, with scripted answers."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from browsing import choose_action, import_chat, open_view, send, take_picture, unfold, until
from playwright.sync_api import BrowserContext, Error, Locator, Page, Route, expect
from scripted import ScriptedEngine

from llamado.http.errors import shutting_down

pytestmark = pytest.mark.browser


def answers(page: Page) -> Locator:
    return page.locator("article.assistant .markdown")


def ended(page: Page, n: int) -> None:
    """Wait for `n` complete answers."""
    expect(answers(page)).to_have_count(n)
    page.get_by_role("button", name="Send", exact=True).wait_for()


def test_regenerating_and_editing_create_branches(chat: Page, engine: ScriptedEngine) -> None:
    send(chat, "One")
    ended(chat, 1)
    send(chat, "Two")
    ended(chat, 2)
    expect(answers(chat)).to_have_text(["Answer to 1.", "Answer to 2."])

    engine.say = "Another."
    chat.locator("article.assistant").last.get_by_role("button", name="Regenerate").click()
    ended(chat, 2)
    expect(answers(chat).last).to_have_text("Another.")
    chat.get_by_role("button", name="Previous version").click()
    expect(answers(chat).last).to_have_text("Answer to 2.")
    take_picture(chat, "versions")

    engine.say = lambda prompt: f"Heard {re.findall('<user>(.*?)</>', prompt)}."
    first = chat.locator("article.user").first
    first.hover()
    first.get_by_role("button", name="Edit").click()
    first.get_by_label("Edit the message").fill("Uno")
    first.get_by_role("button", name="Send again").click()
    ended(chat, 1)
    expect(answers(chat)).to_have_text(["Heard ['Uno']."])
    chat.get_by_role("button", name="Previous version").click()
    expect(answers(chat)).to_have_text(["Answer to 1.", "Another."])


def test_stop_and_continue(chat: Page, engine: ScriptedEngine) -> None:
    engine.say, engine.delay, engine.piece = "word " * 2000, 0.02, 5
    send(chat, "Go")
    expect(answers(chat)).to_contain_text("word word")
    chat.get_by_role("button", name="Stop").click()
    chat.get_by_text("Stopped.").wait_for()
    length = len(answers(chat).inner_text())
    until(chat, lambda: bool(engine.cancelled))
    assert length < 5000
    engine.say, engine.delay = "the end", 0.0
    chat.get_by_role("button", name="Continue").click()
    expect(answers(chat)).to_contain_text("the end")
    assert (
        bytes(engine.requests[-1].prompt).decode().rstrip().endswith("word")
    )  # the request contains the partial answer


def test_a_question_can_be_stopped_before_its_request(chat: Page, engine: ScriptedEngine) -> None:
    """Stop replaces Send at once, while the browser still stores the question."""
    chat.get_by_label("Message", exact=True).fill("Go")
    words = chat.evaluate("""async () => {
      document.querySelector(".composer").requestSubmit();
      for (let turn = 0; turn < 20; turn++) await null; // the page renders
      const button = document.querySelector(".composer .primary");
      button.click();
      return button.textContent;
    }""")
    assert words == "Stop"
    chat.get_by_text("Stopped.").wait_for()
    expect(chat.get_by_role("button", name="Send", exact=True)).to_be_visible()
    expect(chat.locator("article.user .message-text")).to_have_text("Go")
    assert engine.requests == []
    chat.locator("article.assistant").get_by_role("button", name="Regenerate").click()
    ended(chat, 1)
    expect(answers(chat)).to_have_text(["Answer to 1."])


def test_chats_are_stored_searched_exported_and_imported(chat: Page, tmp_path: Path) -> None:
    send(chat, "Rivers of Spain")
    ended(chat, 1)
    chat.reload()
    expect(answers(chat)).to_have_text(["Answer to 1."])

    chat.get_by_role("link", name="New chat").click()
    send(chat, "Mountains of Peru")
    ended(chat, 1)
    chats = chat.locator(".chats-row a")
    expect(chats).to_have_text(["Mountains of Peru", "Rivers of Spain"])
    chat.get_by_label("Search chats").fill("SPAIN")
    expect(chats).to_have_text(["Rivers of Spain"])
    chat.get_by_label("Search chats").fill("")

    with chat.expect_download() as download:
        chat.get_by_role("button", name="Export").click()
    file = tmp_path / "chats.json"
    download.value.save_as(file)
    assert len(json.loads(file.read_text())["conversations"]) == 2
    for name in ("Mountains of Peru", "Rivers of Spain"):
        choose_action(chat, name, "Delete")
    expect(chats).to_have_count(0)
    chat.get_by_label("Chat file").set_input_files(file)
    expect(chats).to_have_text(["Mountains of Peru", "Rivers of Spain"])
    chats.last.click()
    expect(answers(chat)).to_have_text(["Answer to 1."])


def test_a_message_sent_right_after_a_click_reaches_the_new_chat(chat: Page) -> None:
    """No frame is drawn between the two."""
    send(chat, "Rivers of Spain")
    ended(chat, 1)
    chat.evaluate("""() => {
      document.querySelector(".new").click();
      document.getElementById("message").value = "Mountains of Peru";
      document.querySelector(".composer").requestSubmit();
    }""")
    expect(chat.get_by_role("heading", level=1)).to_have_text("Mountains of Peru")
    ended(chat, 1)
    expect(chat.locator("article.user .message-text")).to_have_text(["Mountains of Peru"])
    chat.evaluate("""() => {
      document.querySelector(".chats-row:last-child a").click();
      document.getElementById("message").value = "and lakes?";
      document.querySelector(".composer").requestSubmit();
    }""")
    expect(answers(chat)).to_have_text(["Answer to 1.", "Answer to 2."])
    expect(chat.locator("article.user .message-text")).to_have_text(["Rivers of Spain", "and lakes?"])
    chat.go_back()
    expect(chat.locator("article.user .message-text")).to_have_text(["Mountains of Peru"])


def test_other_chats_are_usable_while_an_answer_streams(chat: Page, engine: ScriptedEngine) -> None:
    """Each answer arrives in its own chat."""
    send(chat, "Rivers of Spain")
    ended(chat, 1)
    chat.get_by_role("link", name="New chat").click()
    engine.say = lambda prompt: "Lakes." if "lakes" in prompt else "word " * 300 + "end"
    engine.delay, engine.piece = 0.02, 5
    send(chat, "Mountains of Peru")
    expect(answers(chat)).to_contain_text("word word")
    chat.get_by_role("link", name="Rivers of Spain").click()
    expect(answers(chat)).to_have_text(["Answer to 1."])
    send(chat, "and lakes?")
    ended(chat, 2)
    expect(answers(chat)).to_have_text(["Answer to 1.", "Lakes."])
    assert not engine.cancelled
    chat.get_by_role("link", name="Mountains of Peru").click()
    expect(answers(chat)).to_contain_text("word word")
    chat.get_by_role("link", name="New chat").click()
    expect(answers(chat)).to_have_count(0)
    chat.get_by_role("link", name="Mountains of Peru").click()
    open_view(chat, "Live")
    open_view(chat, "Chat")
    expect(answers(chat)).to_contain_text("word word")  # the chat view reopens the same chat
    chat.get_by_role("link", name="Rivers of Spain").click()
    engine.say = "never " * 300
    send(chat, "and this")
    expect(answers(chat).last).to_contain_text("never never")
    chat.get_by_role("button", name="Stop").click()
    chat.get_by_text("Stopped.").wait_for()
    chat.get_by_role("link", name="Mountains of Peru").click()
    chat.get_by_role("button", name="Send", exact=True).wait_for()
    expect(answers(chat)).to_have_text([re.compile("word end$")])
    assert len(engine.cancelled) == 1
    chat.reload()
    expect(answers(chat)).to_have_text([re.compile("word end$")])


def test_a_chat_is_renamed_in_the_list(chat: Page) -> None:
    send(chat, "Rivers of Spain")
    ended(chat, 1)
    link = chat.locator(".chats-row a")
    for key, name in (("Escape", "Rivers of Spain"), ("Enter", "Ríos")):
        choose_action(chat, "Rivers of Spain", "Rename")
        field = chat.get_by_label("Chat title")
        expect(field).to_be_focused()
        field.fill("Ríos")
        field.press(key)
        expect(link).to_have_text([name])
    expect(chat.get_by_role("heading", level=1)).to_have_text("Ríos")


def test_a_deleted_message_is_restored(chat: Page) -> None:
    send(chat, "Rivers of Spain")
    ended(chat, 1)
    chat.locator("article.user").hover()
    chat.locator("article.user").get_by_role("button", name="Delete").click()
    expect(chat.locator("article")).to_have_count(0)
    chat.get_by_role("button", name="Undo").click()
    expect(answers(chat)).to_have_text(["Answer to 1."])
    chat.reload()
    expect(answers(chat)).to_have_text(["Answer to 1."])


TO_END = "(all) => all.scrollHeight - all.scrollTop - all.clientHeight"

# Inputs before the scrolling that they cause, as when text arrives in between.
INPUTS = {
    "wheel": "(all) => all.dispatchEvent(new WheelEvent('wheel', { deltaY: -100, bubbles: true }))",
    "key": "(all) => all.dispatchEvent(new KeyboardEvent('keydown', { key: 'PageUp', bubbles: true }))",
    "finger": """(all) => {
      for (const [kind, clientY] of [["touchstart", 300], ["touchmove", 340]]) {
        const touches = [new Touch({ identifier: 1, target: all, clientY })];
        all.dispatchEvent(new TouchEvent(kind, { touches, bubbles: true }));
      }
    }""",
    "scroll bar": "(all) => all.scrollTo(0, 0)",
}


def test_scrolling_up_stops_autoscroll(chat: Page, engine: ScriptedEngine) -> None:
    """Latest returns to the end and starts it again."""
    latest = chat.get_by_role("button", name="Latest")
    messages = chat.locator(".messages")

    def grows() -> None:
        before = messages.evaluate("(all) => all.scrollHeight")
        until(chat, lambda: messages.evaluate("(all) => all.scrollHeight") >= before + 100)

    engine.say, engine.delay, engine.piece = "A line.\n\n" * 5000, 0.02, 9
    send(chat, "Go")
    until(chat, lambda: messages.evaluate("(all) => all.scrollHeight - all.clientHeight") > 100)
    for name, given in INPUTS.items():
        messages.evaluate(given)
        expect(latest).to_have_count(1)
        grows()
        assert messages.evaluate(TO_END) >= 100, name
        latest.click()
        expect(latest).to_have_count(0)
        grows()
        assert messages.evaluate(TO_END) < 2, name
    chat.get_by_role("button", name="Stop").click()
    messages.hover()
    chat.mouse.wheel(0, -200)
    expect(latest).to_have_count(1)
    chat.mouse.wheel(0, 100_000)
    expect(latest).to_have_count(0)


def test_a_long_chat_opens_at_its_end(chat: Page) -> None:
    code = "```python\nfor i in range(10): print(i)\n```\n\n$$\\sum_{i=1}^n \\frac{1}{i}$$\n\n"
    texts = [f"{n}. " + ("A line of words. " * 20 + "\n\n") * (n % 7 + 1) + code * (n > 290) for n in range(300)]
    import_chat(chat, "Long", texts)
    for width in (1280, 390):
        if width == 390:
            chat.get_by_role("link", name="New chat").click()
            chat.set_viewport_size({"width": 390, "height": 800})
            chat.get_by_role("button", name="Chats", exact=True).click()
        chat.get_by_role("link", name="Long").click()
        last = chat.locator("article").last
        expect(last.locator(".hljs-keyword").first).to_be_visible()
        expect(last.locator("math").first).to_be_visible()
        chat.evaluate("""async () => {
          for (let frame = 0; frame < 10; frame++) await new Promise((done) => requestAnimationFrame(done));
        }""")
        assert chat.locator(".messages").evaluate(TO_END) < 2, width
        expect(last).to_be_in_viewport()


def test_statistics_are_shown_while_an_answer_streams(chat: Page, engine: ScriptedEngine) -> None:
    engine.say, engine.delay, engine.piece = "word " * 400, 0.02, 5
    send(chat, "Go")
    stats = chat.locator(".stats.streaming")
    expect(stats).to_contain_text(re.compile(r"[\d.]+ tokens/s.*[1-9]\d* tokens"))
    before = stats.inner_text()
    until(chat, lambda: stats.inner_text() != before)
    chat.get_by_role("button", name="Stop").click()
    expect(chat.locator(".stats:not(.streaming)")).to_contain_text("tokens/s")  # also of a stopped answer
    expect(chat.locator(".context")).to_contain_text(re.compile(r"\d+%"))


def test_the_list_of_chats_stays_hidden_after_a_reload(chat: Page) -> None:
    chat.get_by_role("button", name="Chats", exact=True).click()
    expect(chat.get_by_role("link", name="New chat")).to_be_hidden()
    chat.reload()
    expect(chat.get_by_label("Message", exact=True)).to_be_visible()
    expect(chat.get_by_role("link", name="New chat")).to_be_hidden()
    chat.get_by_role("button", name="Chats", exact=True).click()
    expect(chat.get_by_role("link", name="New chat")).to_be_visible()


def test_every_parameter_can_be_found_and_set(chat: Page, engine: ScriptedEngine) -> None:
    """The list includes parameters without a default."""
    chat.get_by_role("button", name="Settings").click()
    find = chat.get_by_label("Find a parameter")
    for name, typed, sent in (
        ("logit_bias", '[["a", 1.5]]', [["a", 1.5]]),
        ("stop", "one, two", ["one", "two"]),
        ("dry_sequence_breakers", '[","]', [","]),
        ("xtc_probability", "0.25", 0.25),
        ("repeat_penalty", "1.1", 1.1),
    ):
        find.fill(name)
        field = chat.get_by_label(name, exact=True)
        field.fill(typed)
        expect(chat.locator("details .parameter:visible")).to_have_count(1)
        find.fill("")
        with chat.expect_request("**/v1/chat/completions") as asked:
            send(chat, name)
        assert asked.value.post_data_json[name] == sent
        chat.get_by_role("button", name="Send", exact=True).wait_for()
    find.fill("that the penalties consider")  # by its description
    expect(chat.get_by_label("repeat_last_n", exact=True)).to_be_visible()
    find.fill("no such parameter")
    chat.get_by_text("No parameter found.").wait_for()


def test_settings_reach_the_model(chat: Page, engine: ScriptedEngine) -> None:
    chat.get_by_role("button", name="Settings").click()
    unfold(chat, "Sampling", "Advanced")
    chat.get_by_label("System prompt").fill("Be brief.")
    chat.get_by_label("top_k", exact=True).fill("7")
    chat.get_by_label("temperature", exact=True).fill("abc")
    chat.get_by_label("JSON schema").click()
    chat.get_by_text("expected a number").wait_for()
    take_picture(chat, "settings")
    assert chat.get_by_label("min_p", exact=True).get_attribute("placeholder") == "0.05"
    chat.get_by_label("JSON schema").fill('{"type": "object"}')
    chat.get_by_label("JSON schema").blur()
    send(chat, "Hello")
    ended(chat, 1)
    request = engine.requests[-1]
    assert request.params.sampling.top_k == 7 and request.params.sampling.temperature == pytest.approx(0.8)
    assert b"<system>Be brief.</>" in bytes(request.prompt)
    chat.get_by_label("JSON schema").fill('{"type": ')
    chat.get_by_label("JSON schema").blur()
    send(chat, "Again")
    chat.locator("article.assistant .notice").get_by_text("The JSON schema").wait_for()


def test_loading_parameters_keeps_typed_text(chat: Page, engine: ScriptedEngine) -> None:
    """The parameters arrive while the user types."""
    settings = chat.get_by_role("button", name="Settings", exact=True)
    settings.click()
    unfold(chat, "Sampling", "Advanced")
    settings.click()
    pending: list[Route] = []
    chat.route("**/props", lambda route: pending.append(route))
    settings.click()
    fields = {"top_k": "12", "temperature": "0.5", "System prompt": "Be brief.", "Probabilities: ": "3"}
    for name, text in fields.items():
        field = chat.get_by_label(name, exact=name != "Probabilities: ")
        field.press("ControlOrMeta+a")
        field.press_sequentially(text)
        until(chat, lambda: bool(pending))
        with chat.expect_response("**/props"):
            pending.pop().continue_()
        chat.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        expect(field).to_have_value(text)
        chat.locator("aside.settings h2").click()
        settings.click()  # the parameters are loaded again
        settings.click()
    send(chat, "Hello")
    ended(chat, 1)
    request = engine.requests[-1]
    assert (request.params.sampling.top_k, request.params.sampling.temperature, request.params.n_probs) == (12, 0.5, 3)
    assert b"<system>Be brief.</>" in bytes(request.prompt)


def test_invalid_values_stay_in_the_field(chat: Page) -> None:
    chat.get_by_role("button", name="Settings").click()
    field = chat.get_by_label("temperature", exact=True)
    field.fill("abc")
    chat.get_by_text("expected a number").wait_for()
    expect(field).to_have_value("abc")
    unfold(chat, "Sampling")
    chat.get_by_label("top_k", exact=True).fill("7")
    chat.get_by_label("top_k", exact=True).blur()
    chat.get_by_role("button", name="Reset to server defaults").click()
    expect(field).to_have_value("")
    expect(chat.get_by_label("top_k", exact=True)).to_have_value("")
    expect(chat.get_by_text("expected a number")).to_have_count(0)


def test_candidates_of_a_token_are_shown(chat: Page) -> None:
    chat.get_by_role("button", name="Settings").click()
    unfold(chat, "Advanced")
    chat.get_by_label("Probabilities: ").fill("2")
    chat.get_by_label("Probabilities: ").blur()
    send(chat, "Hello")
    ended(chat, 1)
    chat.locator("article.assistant").get_by_role("button", name="Probabilities").click()
    token = chat.locator(".token").first
    token.hover()
    expect(chat.locator(".candidates .taken")).to_have_text(re.compile(r"A\s*50\.0%"))


def test_attached_files_are_part_of_the_prompt(chat: Page, engine: ScriptedEngine, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("the secret is seven")
    (tmp_path / "letter.pdf").write_bytes(pdf("Dear reader"))
    (tmp_path / "noise.bin").write_bytes(b"\xff\xfe\x00\x01")
    files = chat.get_by_label("Files to attach")
    files.set_input_files([tmp_path / "notes.txt", tmp_path / "letter.pdf"])
    expect(chat.locator(".chip")).to_have_count(2)
    files.set_input_files(tmp_path / "noise.bin")
    chat.get_by_text("noise.bin: not a text file").wait_for()
    send(chat, "What is it?")
    ended(chat, 1)
    prompt = bytes(engine.requests[-1].prompt).decode()
    assert "File: notes.txt\n```\nthe secret is seven\n```" in prompt and "Dear reader" in prompt


def pdf(text: str) -> bytes:
    """Return a PDF of one page with one line."""
    content = f"BT /F1 24 Tf 72 700 Td ({text}) Tj ET".encode()
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R"
        b" /Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(content), content),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    out, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    trailer = b"trailer\n<< /Size 6 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % len(out)
    return out + b"xref\n0 6\n0000000000 65535 f \n" + table + trailer


STORED = """async (text) => {
  const opened = indexedDB.open("llamado");
  await new Promise((done) => (opened.onsuccess = done));
  const all = opened.result.transaction("messages").objectStore("messages").getAll();
  await new Promise((done) => (all.onsuccess = done));
  opened.result.close();
  return all.result.some((one) => one.content.includes(text));
}"""


@pytest.mark.parametrize("how", ["reload", "crash"])
def test_an_interrupted_answer_is_stored_and_continued(
    chat: Page, engine: ScriptedEngine, context: BrowserContext, how: str
) -> None:
    goes_on = threading.Event()
    context.route("**/v1/streams/lookup", lambda route: route.fulfill(json=[]))  # the server was restarted
    engine.say, engine.piece, engine.pause = "The Ebro rises in Cantabria.", 8, lambda: goes_on.wait(120)
    try:
        send(chat, "Go")
        expect(answers(chat)).to_have_text("The Ebro")
        page = chat
        if how == "reload":
            page.reload()
        else:
            until(page, lambda: page.evaluate(STORED, "The Ebro"))
            address = page.url
            with page.expect_event("crash"), contextlib.suppress(Error):
                page.goto("chrome://crash")
            page = context.new_page()
            page.goto(address)
        expect(answers(page)).to_have_text("The Ebro")
        page.get_by_text("Interrupted").wait_for()
    finally:
        goes_on.set()
    engine.say, engine.piece = " is a river.", 4
    page.get_by_role("button", name="Continue").click()
    ended(page, 1)
    expect(answers(page)).to_have_text("The Ebro is a river.")
    expect(page.get_by_text("Interrupted")).to_have_count(0)
    assert bytes(engine.requests[-1].prompt).decode().endswith("The Ebro")


@pytest.mark.parametrize("view", ["Chat", "Complete"])
def test_a_stream_without_an_end_is_marked_as_interrupted(chat: Page, view: str) -> None:
    chunk = {"choices": [{"delta": {"content": "The Ebro"}}], "content": "The Ebro"}
    chat.route(
        "**/*completion*",
        lambda route: route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(chunk)}\n\n"),
    )
    open_view(chat, view)
    if view == "Chat":
        send(chat, "Go")
    else:
        chat.get_by_label("Text", exact=True).fill("Go: ")
        chat.keyboard.press("ControlOrMeta+Enter")
    chat.get_by_text("Interrupted").wait_for()
    if view == "Chat":
        chat.reload()
        chat.get_by_text("Interrupted").wait_for()
        expect(answers(chat)).to_have_text("The Ebro")


def test_each_chat_has_its_own_draft(chat: Page, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("the secret is seven")
    field = chat.get_by_label("Message", exact=True)
    new, rivers = chat.get_by_role("link", name="New chat"), chat.get_by_role("link", name="Rivers of Spain")
    send(chat, "Rivers of Spain")
    ended(chat, 1)
    expect(field).to_have_value("")

    field.fill("and lakes?")
    chat.get_by_label("Files to attach").set_input_files(tmp_path / "notes.txt")
    expect(chat.locator(".chip")).to_have_count(1)
    open_view(chat, "Live")
    expect(field).to_have_count(0)
    open_view(chat, "Chat")
    expect(answers(chat)).to_have_count(1)
    expect(field).to_have_value("and lakes?")
    expect(chat.locator(".chip")).to_have_count(1)

    new.click()
    expect(field).to_have_value("")
    expect(chat.locator(".chip")).to_have_count(0)
    field.fill("Mountains of Peru")
    chat.reload()
    expect(field).to_have_value("Mountains of Peru")
    rivers.click()
    expect(field).to_have_value("and lakes?")
    chat.reload()
    expect(answers(chat)).to_have_count(1)
    expect(field).to_have_value("and lakes?")

    field.press("Enter")
    ended(chat, 2)
    new.click()
    expect(field).to_have_value("Mountains of Peru")
    rivers.click()
    expect(field).to_have_value("")


FIRST_TOKEN = {"choices": [{"delta": {"content": "A"}}]}


@pytest.mark.parametrize(
    ("status", "body", "message", "advice"),
    [
        (0, "", "Cannot reach the server", "choose Regenerate"),
        (500, {"error": {"message": "device lost."}}, "device lost", "choose Regenerate"),
        (503, {"error": {"message": "Loading model"}}, "The model is still loading", "choose Regenerate"),
        (400, {"error": {"message": "no.", "type": "exceed_context_size_error"}}, "longer than", "start a new chat"),
        (200, [FIRST_TOKEN, {"error": {"message": "gone"}}], "gone", "choose Continue"),
        (200, [FIRST_TOKEN, {"error": shutting_down().error}], "was shut down", "choose Continue"),
    ],
)  # fmt: skip
def test_an_error_is_shown_once_with_what_to_do(chat: Page, status: int, body: Any, message: str, advice: str) -> None:
    chat.expected_errors.append("Failed to load|ERR_")  # type: ignore[attr-defined]

    def answer(route: Route) -> None:
        if status == 0:
            route.abort()
        elif status == 200:
            events = "".join(f"data: {json.dumps(one)}\n\n" for one in body)
            route.fulfill(content_type="text/event-stream", body=events)
        else:
            route.fulfill(status=status, json=body)

    chat.route("**/v1/chat/completions", answer)
    send(chat, "Go")
    expect(chat.locator("article.assistant .notice")).to_contain_text(advice)
    expect(chat.get_by_text(message)).to_have_count(1)
    chat.unroute_all()
    chat.get_by_role(
        "button", name=advice.removeprefix("choose ") if advice.startswith("choose") else "Regenerate"
    ).click()
    ended(chat, 1)
    expect(answers(chat)).to_contain_text("Answer to 1.")
    expect(chat.get_by_text(message)).to_have_count(0)
