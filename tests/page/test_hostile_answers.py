"""Hostile answers, names and files: no script runs, no request leaves, and the page stays responsive."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from browsing import TRAP, Listener, computing, send
from playwright.sync_api import Page, expect
from scripted import ScriptedEngine, scripted_server

pytestmark = pytest.mark.browser


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine("x", piece=64)


@pytest.fixture
def chat(page: Page, engine: ScriptedEngine, listener: Listener) -> Iterator[Page]:
    """A page with the chat open. The test fails if a script of an answer ran or a request was sent."""
    page.add_init_script(TRAP)
    with scripted_server(engine) as address:
        page.goto(address)
        page.get_by_label("Message", exact=True).wait_for()
        yield page
        time.sleep(0.3)
        assert page.evaluate("globalThis.ran") == [] and not listener.seen
        assert page.url.startswith(address) and len(page.context.pages) == 1


def ask(page: Page, text: str = "Go") -> None:
    send(page, text)
    page.get_by_role("button", name="Send", exact=True).wait_for()


def markup(out: str) -> str:
    """Return markup and links that would run scripts or send requests."""
    return f"""
<script>pwn(1)</script><script src="{out}/s.js"></script>
<img src=x onerror=pwn(2)><img src="{out}/i.png">
<svg onload=pwn(3)><image href="{out}/v"/><script>pwn(4)</script></svg>
<iframe srcdoc="<script>parent.pwn(5)</script>"></iframe><iframe src="{out}/f"></iframe>
<link rel=stylesheet href="{out}/c.css"><style>@import "{out}/d.css"; * {{ background: url({out}/b) }}</style>
<base href="{out}"><meta http-equiv=refresh content="0;url={out}/r"><object data="{out}/o"></object>
<form action="{out}/p"><input autofocus onfocus=pwn(6)></form><details open ontoggle=pwn(7)>x</details>
<math><maction actiontype="statusline#{out}">x</maction></math><a href="javascript:pwn(8)">raw</a>

[click](javascript:pwn(9)) [click](JAVASCRIPT:pwn(10)) [click](java\tscript:pwn(11))
[click](data:text/html,<script>pwn(12)</script>)
[click](vbscript:pwn(13)) [click](file:///etc/passwd) [click](blob:null/x) <javascript:pwn(14)> ![p]({out}/p.png)
![p](javascript:pwn(15)) [ref][r] ![ref][r]

[r]: javascript:pwn(16)

$\\href{{javascript:pwn(17)}}{{x}}$ $\\includegraphics{{{out}/g.png}}$ $\\url{{{out}/u}}$
$\\class{{x" onclick="pwn(18)}}{{y}}$
$\\style{{background:url({out}/st)}}{{z}}$ $\\htmlData{{onclick=pwn(19)}}{{q}}$

```html" onmouseover="pwn(20)
<script>pwn(21)</script>
```

| <img src=x onerror=pwn(22)> | [t](javascript:pwn(23)) |
|---|---|
| <svg onload=pwn(24)> | `<script>pwn(25)</script>` |
"""


def test_markup_is_shown_as_text(chat: Page, engine: ScriptedEngine, listener: Listener) -> None:
    engine.say = markup(listener.address)
    ask(chat)
    answer = chat.locator("article.assistant")
    expect(answer).to_contain_text("<script>pwn(21)</script>")
    assert not chat.locator(
        "article :is(script, img, iframe, object, link, style, base, meta, form, input, maction, image)"
    ).count()
    links = answer.locator("a").evaluate_all("(all) => all.map((one) => one.getAttribute('href'))")
    assert all(link.startswith(("http://", "https://", "mailto:")) for link in links), links
    handlers = "(all) => all.flatMap((one) => one.getAttributeNames()).filter((name) => name.startsWith('on'))"
    assert answer.locator("*").evaluate_all(handlers) == []
    for click in answer.get_by_text("click").all():
        click.click()
    answer.get_by_text("raw").first.click()


def test_hostile_names_titles_and_errors_are_shown_as_text(page: Page, listener: Listener) -> None:
    page.add_init_script(TRAP)
    page.expected_errors.append("400|500")  # type: ignore[attr-defined]
    evil = f'<img src="{listener.address}" onerror=pwn(1)>\u202etxt.exe<script>pwn(2)</script>'
    engine = ScriptedEngine("x")
    with scripted_server(engine) as address:

        def models(route: Any) -> None:
            route.fulfill(json={"data": [{"id": evil, "status": {"value": evil}}, {"id": "b"}]})

        def props(route: Any) -> None:
            body = route.fetch().json()
            route.fulfill(json=body | {"model_alias": evil, "tools_enabled": True})

        page.route("**/v1/models", models)
        page.route("**/props*", props)
        tool = {"tool": evil, "definition": {"type": "function", "function": {"name": evil, "description": evil}}}
        page.route("**/tools", lambda route: route.fulfill(json=[tool]))
        page.goto(address)
        page.get_by_role("button", name="Settings").click()
        expect(page.get_by_role("combobox", name="Model")).to_contain_text("<img")
        ask(page, evil)  # also the title
        expect(page.get_by_role("heading", level=1)).to_contain_text("<img")
        kept = {
            "format": "llamado-conversations",
            "version": 1,
            "conversations": [
                {
                    "conversation": {"title": evil, "leaf": "a", "updated": 1, "settings": {"system": evil}},
                    "messages": [
                        {"id": "a", "parent": None, "role": "assistant", "content": evil, "model": evil, "error": evil,
                         "reasoning": evil, "attachments": [{"name": evil, "text": evil}], "__proto__": {"x": 1},
                         "toolCalls": [{"id": evil, "name": evil, "arguments": evil}]},
                    ],
                }
            ],
        }  # fmt: skip
        page.get_by_label("Chat file").set_input_files(
            {"name": "x.json", "mimeType": "application/json", "buffer": json.dumps(kept).encode()}
        )
        page.get_by_text("1 chat imported").wait_for()
        page.locator(".chats-row a").last.click()
        page.locator("article.assistant .tool-call").wait_for()
        for broken in (3, [None], [{"conversation": {"title": evil}, "messages": [{"role": evil}]}]):
            text = json.dumps({"format": "llamado-conversations", "version": 1, "conversations": broken})
            page.get_by_label("Chat file").set_input_files(
                {"name": "x.json", "mimeType": "application/json", "buffer": text.encode()}
            )
            expect(page.locator(".short-notice").last).to_contain_text("no chats" if broken == 3 else "incomplete")
        page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(status=500, json={"error": {"message": evil, "type": evil}}),
        )
        page.get_by_role("link", name="New chat").click()
        ask(page)
        expect(page.locator("article.assistant .notice")).to_contain_text("<img")
        assert "\u202e" not in page.locator("body").inner_text().replace(evil, "")
        assert page.evaluate("globalThis.ran") == [] and not listener.seen
        assert not page.locator("main :is(img, script, iframe)").count()


LONG = {
    "a line of a megabyte": "x" * 1_000_000,
    "a line of a megabyte in code": "```\n" + "y " * 500_000 + "\n```",
    "code of 100,000 tokens": "```python\n" + "for i in range(10): print(i)\n" * 15_000 + "```",
    "quotes in quotes": ">" * 10_000 + " deep",
    "brackets": "[" * 5_000 + "](x)" * 10,
    "stars": "*a **b " * 8_000,
    "backticks": "".join("`" * n + " " for n in range(1, 500)),
    "lists in lists": "\n".join(" " * (2 * n) + "- x" for n in range(200)),
    "a table of 100,000 cells": "|" + "a|" * 20 + "\n|" + "-|" * 20 + "\n" + ("|" + "c|" * 20 + "\n") * 5_000,
    "formulas without end": "$$" + "{" * 4_000 + "$$\n\n" + "$x$ " * 3_000,
    "formulas that define themselves": "$\\def\\a{\\a\\a}\\a$ $\\newcommand{\\b}{\\b}\\b$ $\\def\\c{\\c x\\c}\\c$",
    "dollars": "$" * 20_000 + " " + "$a " * 20_000,
    "links": "http://a.example/" * 20_000,
    "addresses": "a@b.c" * 20_000,
    "turned around": "\u202e\u2066abc\u2069" * 20_000,
    "zero-width": "a\u200b\u200d\ufeff" * 50_000,
    "accents on accents": "e" + "\u0301" * 20_000,
    "a terminal's codes": "\x1b[31mred\x1b[0m\x07\x08" * 5_000,
    "lines": "\n" * 100_000 + "end",
    "headings": "# h\n" * 10_000,
    "entities": "&amp;&lt;&#0;&#xFFFFFFF;" * 10_000,
}
MOST_MS = 300  # of processor time per task: up to 100 on an idle machine, and seconds where work is not divided


@pytest.mark.full
@pytest.mark.parametrize("what", LONG)
def test_long_answers_keep_tasks_short(chat: Page, engine: ScriptedEngine, what: str) -> None:
    """No input is handled during a task, while the answer streams or afterwards."""
    engine.say = LONG[what]
    engine.piece, engine.delay = max(64, len(LONG[what].encode()) // 150), 0.01
    with computing(chat) as tasks:
        ask(chat)
        chat.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestIdleCallback(done)))")
    print(f"LONGEST {what}: {max(tasks):.0f} ms of {sum(tasks):.0f}")
    assert max(tasks) < MOST_MS, sorted(tasks)[-5:]
    assert chat.locator("article.assistant").inner_text().strip() and not chat.locator(".notice").count()


def test_processor_time_is_measured(page: Page) -> None:
    """A loop counts and waiting does not, whatever the load of the machine."""
    loop = "const end = performance.now() + 3000; while (performance.now() < end);"
    with computing(page) as tasks:
        page.evaluate("() => new Promise((done) => setTimeout(done, 300))")
    assert 0 < max(tasks) < MOST_MS
    with computing(page) as tasks:
        page.evaluate("() => {" + loop + "}")
    assert max(tasks) > MOST_MS
