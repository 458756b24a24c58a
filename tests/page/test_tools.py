"""Tools in the chat: the server's own and those of MCP servers."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import uvicorn
from browsing import send, take_picture, unfold
from playwright.sync_api import Page, expect
from scripted import ScriptedEngine, scripted_server
from waiting import GUARD

from llamado.tools.settings import ToolSettings

pytestmark = [pytest.mark.browser, pytest.mark.full]

TEMPLATE = """
{%- if tools %}<tools>{{ tools | tojson }}</tools> <tool_call>{"name": N, "arguments": A}</tool_call>{% endif -%}
{%- for m in messages %}<|im_start|>{{ m.role }}
  {{- '\n' ~ (m.content or '') }}
  {%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def calls_then(answer: str, *calls: str) -> ScriptedEngine:
    """Return an engine that makes the calls, and answers once it has a result."""
    return ScriptedEngine(lambda prompt: answer if "<|im_start|>tool" in prompt else "".join(calls))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "notes.txt").write_text("the secret is seven\n")
    return tmp_path


def test_server_tools_run_on_confirmation_and_automatically(page: Page, folder: Path) -> None:
    engine = calls_then("It is seven.", call("read_file", '{"path": "notes.txt"}'))
    settings = ToolSettings(builtin=("read_file", "write_file"), folder=str(folder))
    with scripted_server(engine, source=TEMPLATE, tools=settings) as address:
        page.goto(address)
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("read_file", exact=True).check()
        send(page, "What is the secret?")
        page.get_by_role("button", name="Run on the server").click()
        page.get_by_text("It is seven.").wait_for()
        expect(page.locator("article.tool .message-text")).to_contain_text("the secret is seven")
        prompts = [bytes(token for token in one.prompt if token < 256).decode() for one in engine.requests]
        assert "read_file" in prompts[0] and "write_file" not in prompts[0] and "the secret is seven" in prompts[1]

        # The server rejects probabilities together with tools, so the page does not request them.
        unfold(page, "Advanced")
        page.get_by_label("Probabilities: ").fill("2")
        page.get_by_text("Not available together with tools.").wait_for()

        page.get_by_label("Run read_file without asking").check()
        page.get_by_role("link", name="New chat").click()
        send(page, "And again?")
        page.get_by_text("It is seven.").wait_for()
        assert len(engine.requests) == 4
        expect(page.get_by_role("button", name="Run on the server")).to_have_count(0)


def test_endless_tool_calls_are_stopped(page: Page, folder: Path) -> None:
    engine = ScriptedEngine(call("read_file", '{"path": "none.txt"}'))
    settings = ToolSettings(builtin=("read_file",), folder=str(folder))
    with scripted_server(engine, source=TEMPLATE, tools=settings) as address:
        page.goto(address)
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("read_file", exact=True).check()
        page.get_by_label("Run read_file without asking").check()
        send(page, "Go")
        page.get_by_role("alert").get_by_text("10 rounds of automatic tool calls").wait_for()
        assert len(engine.requests) == 11
        expect(page.locator("article.tool .message-text").first).to_contain_text("Error: ")
        page.get_by_role("button", name="Run on the server").wait_for()


def test_tools_of_an_mcp_server_run_through_the_proxy(page: Page) -> None:
    engine = calls_then("Five.", call("add", '{"a": 2, "b": 3}'))
    with (
        mcp_server() as mcp,
        scripted_server(engine, source=TEMPLATE, tools=ToolSettings(proxy=True)) as address,
    ):
        page.goto(address)
        page.get_by_role("button", name="Settings").click()
        field = page.get_by_label("URL of an MCP server")
        field.fill("nonsense")
        page.get_by_role("button", name="Add", exact=True).click()
        page.get_by_text("invalid URL").wait_for()
        field.fill(mcp)
        page.get_by_role("button", name="Add", exact=True).click()
        page.get_by_text("1 tool", exact=True).wait_for()
        page.get_by_label("add", exact=True).check()
        send(page, "2 + 3?")
        page.get_by_role("button", name=f"Run at {mcp}").click()
        page.get_by_text("Five.").wait_for()
        expect(page.locator("article.tool .message-text")).to_have_text("5")
        take_picture(page, "tools")
        page.get_by_role("button", name=f"Remove {mcp}").click()
        expect(page.get_by_label("add", exact=True)).to_have_count(0)


class mcp_server:
    """An MCP server with one tool, over streamable HTTP; yields its address."""

    def __enter__(self) -> str:
        from mcp.server.mcpserver import MCPServer

        app = MCPServer("sums")

        @app.tool()
        def add(a: int, b: int) -> int:
            """Return the sum."""
            return a + b

        config = uvicorn.Config(app.streamable_http_app(), port=0, log_level="error")
        self.server = uvicorn.Server(config)
        self.server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()
            time.sleep(0.005)
        return f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}/mcp"

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = self.server.force_exit = True
        self.thread.join(GUARD)
