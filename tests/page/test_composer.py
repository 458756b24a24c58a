"""The field for messages: pasted texts, waiting messages, token counts, and the editor of a message."""

from __future__ import annotations

import re
import threading

import pytest
from browsing import assert_accessible, send, unfold, until
from playwright.sync_api import Page, expect
from scripted import ScriptedEngine

pytestmark = pytest.mark.browser

PASTE = """([selector, text]) => {
  const data = new DataTransfer();
  data.setData("text/plain", text);
  const pasted = new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true });
  return document.querySelector(selector).dispatchEvent(pasted);
}"""


STORED_FILES = """async () => {
  const opened = indexedDB.open("llamado-queue");
  await new Promise((done) => (opened.onsuccess = done));
  const count = opened.result.transaction("files").objectStore("files").count();
  await new Promise((done) => (count.onsuccess = done));
  opened.result.close();
  return count.result;
}"""


def test_a_long_pasted_text_becomes_an_attachment(chat: Page, engine: ScriptedEngine) -> None:
    assert chat.evaluate(PASTE, ["#message", "x" * 2499])  # the browser pastes it
    expect(chat.locator(".chip")).to_have_count(0)
    assert not chat.evaluate(PASTE, ["#message", "b" * 200_000])
    assert not chat.evaluate(PASTE, ["#message", "a" * 2500])
    expect(chat.locator(".chip")).to_have_text(["pasted text 1.txt", "pasted text 2.txt"])
    expect(chat.get_by_label("Message", exact=True)).to_have_value("")
    chat.get_by_role("button", name="Remove pasted text 1.txt").click()
    expect(chat.locator(".chip")).to_have_text(["pasted text 2.txt"])
    chat.get_by_label("Message", exact=True).fill("What is this?")
    chat.keyboard.press("Enter")
    chat.get_by_text("Answer to 1.").wait_for()
    prompt = bytes(engine.requests[-1].prompt).decode()
    assert "a" * 2500 in prompt and "bb" not in prompt and "What is this?" in prompt


def test_messages_wait_for_the_end_of_an_answer(chat: Page, engine: ScriptedEngine) -> None:
    goes_on = threading.Event()
    engine.pause = lambda: goes_on.wait(120)
    try:
        send(chat, "One")
        chat.get_by_role("button", name="Stop", exact=True).wait_for()
        for text in ("Two", "Three", "Four"):
            send(chat, text)
        waiting = chat.get_by_role("list", name="Waiting messages").get_by_role("listitem")
        expect(waiting).to_have_count(3)
        expect(chat.locator("article.user .message-text")).to_have_text(["One"])
        waiting.nth(1).get_by_role("button", name="Remove this waiting message").click()
        waiting.nth(1).get_by_role("button", name="Edit this waiting message").click()
        expect(chat.get_by_label("Message", exact=True)).to_have_value("Four")
        expect(chat.get_by_label("Message", exact=True)).to_be_focused()
        chat.get_by_label("Message", exact=True).fill("Five")
        chat.get_by_role("button", name="Send after this answer").click()
        expect(waiting).to_have_count(2)
        chat.get_by_role("link", name="New chat").click()  # they follow in their own chat
    finally:
        goes_on.set()
    chat.get_by_role("link", name="One", exact=True).click()
    expect(chat.locator("article.assistant .markdown")).to_have_text(["Answer to 1.", "Answer to 2.", "Answer to 3."])
    expect(chat.locator("article.user .message-text")).to_have_text(["One", "Two", "Five"])
    expect(waiting).to_have_count(0)


def test_a_stopped_answer_keeps_messages_waiting(chat: Page, engine: ScriptedEngine) -> None:
    engine.say, engine.delay, engine.piece = "word " * 2000, 0.02, 5
    send(chat, "One")
    chat.locator("article.assistant .markdown", has_text="word").wait_for()
    send(chat, "Two")
    chat.get_by_role("button", name="Stop", exact=True).click()
    chat.get_by_text("Stopped.").wait_for()
    chat.reload()
    waiting = chat.get_by_role("list", name="Waiting messages").get_by_role("listitem")
    expect(waiting).to_have_count(1)
    engine.say, engine.delay = "Done.", 0.0
    waiting.get_by_role("button", name="Send now").click()
    expect(chat.locator("article.assistant .markdown").last).to_have_text("Done.")
    expect(waiting).to_have_count(0)


def test_the_tokens_of_a_draft_are_counted(chat: Page) -> None:
    expect(chat.locator(".composer-foot")).to_contain_text("fake")
    chat.get_by_label("Message", exact=True).fill("Rivers")
    expect(chat.locator(".composer-foot .draft-tokens")).to_have_text("+ 6 tokens")
    chat.keyboard.press("Enter")
    chat.get_by_text("Answer to 1.").wait_for()
    expect(chat.locator(".composer-foot .draft-tokens")).to_have_count(0)
    expect(chat.locator(".composer-foot .context")).to_have_text(re.compile(r"\d+%"))


def test_the_editor_of_a_message_works_by_keyboard(chat: Page) -> None:
    send(chat, "One")
    chat.get_by_role("button", name="Send", exact=True).wait_for()
    answer = chat.locator("article.assistant")
    edit = answer.get_by_role("button", name="Edit")
    field = answer.get_by_label("Edit the message")
    for key, text in (("Escape", "Answer to 1."), ("Control+Enter", "Changed")):
        edit.click()
        expect(field).to_be_focused()
        assert field.evaluate("(one) => getComputedStyle(one).outlineStyle") == "solid"
        field.fill("Changed")
        field.press(key)
        expect(answer.locator(".markdown")).to_have_text(text)
        expect(edit).to_be_focused()


def test_the_arrows_between_versions_keep_the_focus(chat: Page) -> None:
    send(chat, "One")
    answer = chat.locator("article.assistant")
    for _ in range(2):
        chat.get_by_role("button", name="Send", exact=True).wait_for()
        answer.get_by_role("button", name="Regenerate").click()
    chat.get_by_text("3 of 3").wait_for()
    chat.get_by_role("button", name="Send", exact=True).wait_for()
    previous = answer.get_by_role("button", name="Previous version")
    previous.focus()
    for at in ("2 of 3", "1 of 3", "1 of 3"):
        chat.keyboard.press("Enter")
        chat.get_by_text(at).wait_for()
        expect(previous).to_be_focused()


def test_a_saved_prompt_is_inserted_by_its_name(chat: Page) -> None:
    field = chat.get_by_label("Message", exact=True)
    chat.get_by_role("button", name="Saved prompts").click()
    chat.get_by_role("menuitem", name="Manage saved prompts").click()
    library = chat.get_by_role("dialog", name="Saved prompts")
    for name, text in (("translate", "Translate this into German:"), ("explain", "Explain this:")):
        if name == "explain":
            library.get_by_role("button", name="Add a prompt").click()
        library.get_by_label("Name").fill(name)
        library.get_by_label("Text").fill(text)
        library.get_by_role("button", name="Save").click()
    assert_accessible(chat)
    library.get_by_role("button", name="Close").click()
    chat.reload()
    field.press_sequentially("/")
    options = chat.get_by_role("listbox", name="Saved prompts").get_by_role("option")
    expect(options).to_have_text([re.compile("^/explain"), re.compile("^/translate")])
    assert_accessible(chat)
    field.press_sequentially("tra")
    expect(options).to_have_count(1)
    field.press("Enter")
    expect(field).to_have_value("Translate this into German:")
    expect(options).to_have_count(0)
    chat.get_by_role("button", name="Saved prompts").click()
    chat.get_by_role("menuitem", name="explain").click()
    expect(field).to_have_value("Explain this:\n\nTranslate this into German:")
    field.fill("/tra")
    field.press("Escape")
    expect(options).to_have_count(0)
    chat.get_by_role("button", name="Saved prompts").click()
    chat.get_by_role("menuitem", name="Manage saved prompts").click()
    library.get_by_role("button", name="Edit the prompt translate").click()
    library.get_by_label("Name").fill("german")
    library.get_by_role("button", name="Save").click()
    library.get_by_role("button", name="Delete the prompt explain").click()
    library.get_by_role("button", name="Close").click()
    field.fill("/")
    expect(options).to_have_text([re.compile("^/german")])


def test_one_of_several_answers_is_chosen(chat: Page, engine: ScriptedEngine) -> None:
    numbers = iter("abc")
    engine.say = lambda prompt: f"Answer {next(numbers, 'to the second')}."
    chat.get_by_role("button", name="Settings").click()
    unfold(chat, "All chats")
    chat.get_by_label("Answers to each question").select_option("3")
    chat.get_by_role("button", name="Close settings").click()
    send(chat, "One")
    choice = chat.get_by_role("region", name="Choose an answer")
    expect(choice.locator(".markdown")).to_have_count(3)
    chat.get_by_role("button", name="Send", exact=True).wait_for()
    expect(choice.locator(".markdown")).to_have_text([re.compile(r"Answer [abc]\.")] * 3)
    assert_accessible(chat)
    chat.reload()
    second = choice.locator(".markdown").nth(1).inner_text()
    choice.get_by_role("article", name="Answer 2").get_by_role("button", name="Use this answer").click()
    expect(choice).to_have_count(0)
    expect(chat.locator("article.assistant .markdown")).to_have_text([second])
    chat.get_by_text("2 of 3").wait_for()
    chat.evaluate("""localStorage.setItem("llamado.preferences", '{"titles": false}')""")
    chat.reload()
    send(chat, "Two")
    expect(chat.locator("article.assistant .markdown")).to_have_text([second, "Answer to the second."])
    prompt = bytes(engine.requests[-1].prompt).decode()
    assert second in prompt and prompt.count("Answer") == 1


def test_presets_are_saved_and_applied(chat: Page, engine: ScriptedEngine) -> None:
    chat.get_by_role("button", name="Settings").click()
    chat.get_by_label("System prompt").fill("Be brief.")
    chat.get_by_label("temperature", exact=True).fill("0.5")
    chat.get_by_role("button", name="Save these settings as a preset").click()
    chat.get_by_label("Name of the preset").fill("Brief")
    chat.keyboard.press("Enter")
    preset = chat.get_by_role("combobox", name="Preset")
    expect(preset).to_have_value("Brief")
    chat.get_by_label("System prompt").fill("Be long.")
    expect(preset).to_have_value("")
    chat.reload()
    chat.get_by_role("button", name="Settings").click()
    preset.select_option("Brief")
    expect(chat.get_by_label("System prompt")).to_have_value("Be brief.")
    send(chat, "One")
    chat.get_by_text("Answer to 1.").wait_for()
    assert b"<system>Be brief.</>" in bytes(engine.requests[-1].prompt)
    assert engine.requests[-1].params.sampling.temperature == 0.5
    chat.get_by_role("button", name="Delete this preset").click()
    expect(preset.get_by_role("option")).to_have_text(["No preset"])


def test_waiting_messages_keep_their_files_after_a_reload(chat: Page, engine: ScriptedEngine) -> None:
    goes_on = threading.Event()
    engine.pause = lambda: goes_on.wait(120)
    try:
        send(chat, "One")
        chat.get_by_role("button", name="Stop", exact=True).wait_for()
        chat.evaluate(PASTE, ["#message", "w" * 2500])
        send(chat, "Two")
        waiting = chat.get_by_role("list", name="Waiting messages").get_by_role("listitem")
        expect(waiting.locator(".chip")).to_have_text(["pasted text 1.txt"])
        until(chat, lambda: chat.evaluate(STORED_FILES) == 1)
        chat.reload()
        expect(waiting.locator(".chip")).to_have_text(["pasted text 1.txt"])
    finally:
        goes_on.set()
    chat.get_by_text("Answer to 2.").wait_for()  # after the answer that the page has resumed
    assert "w" * 2500 in bytes(engine.requests[-1].prompt).decode()
    until(chat, lambda: chat.evaluate(STORED_FILES) == 0)
