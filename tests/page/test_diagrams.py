"""Mermaid diagrams: drawn in a frame without an origin, and shown as images that run nothing and load nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from browsing import TRAP, Listener, assert_accessible, send
from playwright.sync_api import Locator, Page, expect
from scripted import ScriptedEngine, scripted_server

pytestmark = pytest.mark.browser

FLOW = "flowchart LR\n  accTitle: From question to answer\n  a[Question] --> b[Answer]"


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(piece=200)


@pytest.fixture
def chat(page: Page, engine: ScriptedEngine) -> Iterator[Page]:
    page.expected_errors.append("sandboxed")  # type: ignore[attr-defined]  # our own scripts run in the frames, too
    page.add_init_script(TRAP)
    with scripted_server(engine) as address:
        page.goto(address)
        yield page


def fenced(code: str) -> str:
    return f"Here:\n\n```mermaid\n{code}\n```\n"


def drawn(page: Page) -> Locator:
    """Return the picture of the last diagram, once it is shown."""
    image = page.locator(".diagram img").last
    expect(image).to_have_js_property("complete", True)
    assert image.evaluate("(image) => image.naturalWidth") > 0
    return image


ACTIVE = """() => [...document.querySelectorAll("*")].flatMap((one) => [
  ...(/^(script|iframe|object|embed|form|foreignObject)$/i.test(one.localName) ? [one.localName] : []),
  ...[...one.attributes].filter(({ name }) => /^on/i.test(name)).map(({ name }) => name),
  ...[...one.attributes].filter(({ value }) => /^\\s*javascript:/i.test(value)).map(({ value }) => value),
])"""


def active_parts(page: Page, image: Locator) -> list[str]:
    """Return the elements and attributes of a picture that could run something, if it were a document."""
    # The page may not fetch `blob:` URLs, but a new window shows them.
    url = image.get_attribute("src")
    with page.context.expect_page() as opened:
        page.evaluate("(url) => void open(url)", url)
    found: list[str] = opened.value.evaluate(ACTIVE)
    opened.value.close()
    return found


def brightness_of_line(image: Locator) -> int:
    """Return the brightness, 0 to 255, of the first visible pixel in the middle column of a picture."""
    script = """(image) => {
      const canvas = document.createElement("canvas");
      canvas.width = image.naturalWidth, canvas.height = image.naturalHeight;
      const context = canvas.getContext("2d");
      context.drawImage(image, 0, 0);
      const { data } = context.getImageData(Math.floor(canvas.width / 2), 0, 1, canvas.height);
      const at = data.findIndex((value, index) => index % 4 === 3 && value > 100);
      return data[at - 1];
    }"""
    return int(image.evaluate(script))


def test_a_diagram_is_drawn_with_its_title_and_source(chat: Page, engine: ScriptedEngine) -> None:
    engine.say = fenced(FLOW)
    send(chat, "Go")
    image = drawn(chat)
    expect(image).to_have_attribute("alt", "From question to answer")
    assert_accessible(chat)
    button = chat.get_by_role("button", name="Diagram", exact=True)
    expect(button).to_have_attribute("aria-pressed", "true")
    code = chat.locator(".code pre")
    expect(code).to_have_count(0)
    button.focus()
    chat.keyboard.press("Enter")
    expect(code).to_contain_text("a[Question] --> b[Answer]")
    expect(image).to_have_count(0)
    chat.keyboard.press("Enter")
    drawn(chat)
    assert chat.locator("iframe").get_attribute("sandbox") == "allow-scripts"


@pytest.mark.parametrize(
    "code",
    [
        "sequenceDiagram\n  Ann->>Ben: Hello",
        "classDiagram\n  Animal <|-- Dog\n  Animal : +int age",
        "stateDiagram-v2\n  [*] --> Open\n  Open --> [*]",
        "erDiagram\n  USER ||--o{ CHAT : has",
        "gantt\n  title Plan\n  section One\n  Task :a1, 2024-01-01, 30d",
        'pie title Pets\n  "Dogs" : 3\n  "Cats" : 5',
        "gitGraph\n  commit\n  branch next\n  commit",
        "journey\n  title Day\n  section Work\n  Tea: 5: Me",
        "timeline\n  title Time\n  2002 : One",
        "quadrantChart\n  title Reach\n  x-axis Low --> High\n  y-axis Low --> High\n  A: [0.3, 0.6]",
    ],
    ids=lambda code: code.split()[0],
)
@pytest.mark.full
def test_each_kind_of_diagram_is_drawn(chat: Page, engine: ScriptedEngine, code: str) -> None:
    engine.say = fenced(code)
    send(chat, "Go")
    expect(drawn(chat)).to_have_attribute("alt", "Diagram")


def test_a_diagram_follows_the_theme(chat: Page, engine: ScriptedEngine) -> None:
    engine.say = fenced("flowchart LR\n  a[One] -----> b[Two]")
    send(chat, "Go")
    assert brightness_of_line(drawn(chat)) < 100
    before = chat.locator(".diagram img").get_attribute("src")
    chat.emulate_media(color_scheme="dark")
    expect(chat.locator(".diagram img")).not_to_have_attribute("src", before or "")
    assert brightness_of_line(drawn(chat)) > 150
    assert_accessible(chat)


def test_code_that_is_no_diagram_is_shown_with_a_reason(chat: Page, engine: ScriptedEngine) -> None:
    engine.say = fenced("flowchart LR\n  a[One --> ]b") + "\n\n" + fenced(FLOW)
    send(chat, "Go")
    drawn(chat)  # the frame goes on
    block = chat.locator(".code").first
    expect(block.locator(".diagram-failure")).to_have_text("This diagram cannot be drawn, so its code is shown.")
    expect(block.locator("pre")).to_contain_text("a[One --> ]b")
    assert_accessible(chat)


def test_the_code_is_shown_while_the_answer_streams(chat: Page, engine: ScriptedEngine) -> None:
    engine.say = fenced(FLOW)
    engine.piece = 20
    go = threading.Event()
    engine.pause = lambda: go.wait(60)
    send(chat, "Go")
    code = chat.locator(".code pre")
    expect(code).to_be_visible()
    expect(chat.get_by_role("button", name="Diagram", exact=True)).to_have_count(0)
    assert chat.locator("iframe").count() == 0
    go.set()
    drawn(chat)
    expect(code).to_have_count(0)


ATTACKS = {
    "markup": """flowchart LR
  a["<img src=x onerror=pwn(1)><img src='%(out)s/img'>"] -->|"<svg onload=pwn(2)>"| b["<script>pwn(3)</script>"]
  c["<iframe src='%(out)s/frame'></iframe><style>@import '%(out)s/import'</style>"] --> a""",
    "a picture": """flowchart LR
  a@{ img: "%(out)s/picture.png", label: "x", w: 60, h: 60 }""",
    "clicks": """flowchart LR
  a[One] --> b[Two] --> c[Three]
  click a href "javascript:pwn(4)"
  click b call pwn(5)
  click c href "%(out)s/link" _blank""",
    "directives": """%%%%{init: {"securityLevel": "loose", "htmlLabels": true, "flowchart": {"htmlLabels": true},
  "secure": [], "themeCSS": "@import url(%(out)s/css); * {background: url(%(out)s/theme)}",
  "themeVariables": {"lineColor": "red;} @import url(%(out)s/line)"},
  "fontFamily": "x; background: url(%(out)s/font)", "dompurifyConfig": {"ADD_TAGS": ["script", "iframe"]}}}%%%%
flowchart LR
  a["<img src='%(out)s/html' onerror=pwn(6)>"] --> b
  click a call pwn(7)""",
    "front matter": """---
config:
  securityLevel: loose
  htmlLabels: true
  themeCSS: "* { background: url(%(out)s/matter) }"
---
sequenceDiagram
  participant a as <img src=%(out)s/actor onerror=pwn(8)>
  link a: Site @ javascript:pwn(9)
  a->>a: <script>pwn(10)</script>""",
    "classes": """classDiagram
  class A["<img src=%(out)s/class onerror=pwn(11)>"]
  link A "javascript:pwn(12)" "tip<img src=x onerror=pwn(13)>"
  callback A "pwn" "tip" """,
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_diagram_runs_and_requests_nothing(
    chat: Page, engine: ScriptedEngine, listener: Listener, name: str
) -> None:
    chat.expected_errors.append(".")  # type: ignore[attr-defined]  # the browser reports what it blocks
    here = chat.url
    engine.say = fenced(ATTACKS[name] % {"out": listener.address})
    send(chat, "Go")
    expect(chat.locator(".diagram img, .diagram-failure")).to_have_count(1)
    if name != "a picture":  # which the library waits for
        drawn(chat).click(position={"x": 20, "y": 20})
        assert active_parts(chat, drawn(chat)) == []
    for frame in chat.frames:
        assert frame.evaluate("globalThis.ran") == []
    assert not listener.seen
    assert chat.url.startswith(here.split("#")[0]) and len(chat.context.pages) == 1


def test_a_script_in_the_frame_of_diagrams_does_not_run(chat: Page, engine: ScriptedEngine) -> None:
    """Its policy allows the scripts of the page only, if the library ever let one through."""
    chat.expected_errors.append("Content Security Policy|violates")  # type: ignore[attr-defined]
    engine.say = fenced(FLOW)
    send(chat, "Go")
    drawn(chat)
    inner = next(frame for frame in chat.frames if frame.parent_frame and frame.parent_frame.parent_frame)
    inner.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=data:, onerror=pwn(1)>')")
    blocked = inner.evaluate(
        """() => new Promise((done) => {
          addEventListener("securitypolicyviolation", ({ effectiveDirective }) => done(effectiveDirective));
          document.body.append(Object.assign(document.createElement("script"), { textContent: "pwn(2)" }));
        })"""
    )
    assert blocked == "script-src-elem"
    assert inner.evaluate("globalThis.ran") == [] and inner.evaluate("self.origin") == "null"


def test_a_diagram_that_never_ends_does_not_keep_others_waiting(chat: Page, engine: ScriptedEngine) -> None:
    chat.clock.install()
    engine.say = fenced(FLOW)
    send(chat, "Go")
    drawn(chat)
    inner = next(frame for frame in chat.frames if frame.parent_frame and frame.parent_frame.parent_frame)
    inner.evaluate("void (mermaid.render = () => new Promise(() => undefined))")
    engine.say = fenced("flowchart LR\n  never --> ends")
    send(chat, "Go")
    expect(chat.locator(".code pre", has_text="never")).to_be_visible()
    chat.get_by_role("button", name="Send", exact=True).wait_for()
    expect(chat.locator(".code")).to_have_count(2)
    chat.clock.run_for(60_000)
    expect(chat.locator(".diagram-failure")).to_be_visible()
    engine.say = fenced("flowchart LR\n  accTitle: the next\n  a --> b")
    send(chat, "Go")
    expect(chat.get_by_role("img", name="the next")).to_be_visible()
