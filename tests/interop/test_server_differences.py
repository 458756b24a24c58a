"""The same requests to this server and to the real llama-server; each difference is explained, or fails.

Compared are the status, the keys and types of all JSON (of all events, where the answer is a stream), the order of the
kinds of events, the type of an error and, for greedy answers of which the model is sure, the text, why it ended and how
many tokens were counted.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import orjson
import pytest
from ports import free_port
from server_requests import Ask, all_requests
from waiting import GUARD

pytestmark = [pytest.mark.interop, pytest.mark.full]

_TOOLS = "tools reach a model whose template has none: told in words and held by a grammar; llama-server drops them"
# (pattern of "name: difference", why it is so). The first that matches counts.
EXPLAINED: list[tuple[str, str]] = [
    (r"^GET /props: extra tools_enabled:boolean$", "the page asks for tools only where there are some"),
    (r": (status 400 for 500|error invalid_request_error for server_error)$", "a client's fault is 400, never 500"),
    (r"^n_predict=0: text", "the README has no token generated then; llama-server gives one"),
    (r"^prompt huge token", "a token id beyond 32 bits is refused; llama-server cuts it to some other token"),
    (r"^completions two prompts stream: missing \[\]:null", "llama-server sends an event that is null between answers"),
    (r": missing \[\]\.choices\[\]\.delta\.content:null$", "a stream begins with an empty text, as OpenAI's does"),
    (r"^chat tools? (required|choice object)\b.*: extra \S*\.tool_calls\b", _TOOLS),
    (r"^chat tools required stream: missing \[\]\.choices\[\]\.delta\.content:string$", _TOOLS),
    (r"^responses tools required stream: events ", _TOOLS),
    (
        r"^responses tools( required)?( stream)?: (missing|extra) (\[\]\.)?(response\.)?"
        r"(output\[\]|item|part|text|name|arguments)[.:\[]",
        _TOOLS,
    ),
    (r"^anthropic tools\b.*: (missing|extra) (\[\]\.)?(content\[\]|content_block|delta)[.:]", _TOOLS),
    (
        r"^responses .*: figures .*status='incomplete'.* for .*status='completed'",
        "a cut answer is incomplete",
    ),
    (r"^anthropic .*stream: figures \['usage.input_tokens\+cached=\d+'\] for \[\]$", "usage is whole at the end, too"),
    (r"^template (call|reasoning)\b", "calls reach a template that has none as JSON; llama-server drops them"),
    (r"^template assistant null", "an empty answer to continue begins as the template begins answers"),
    (r"^responses .*: (extra|events)", "more of OpenAI's fields and events"),
    (r"^responses .*: status 200 for 400$", "what a model refused stays in the conversation"),
    (r"^anthropic .*: (extra \[\]\.|events .*'ping')", "more of Anthropic's fields and events"),
    (r"^(anthropic|broken|no body|array) .*: extra type:string$", "errors have Anthropic's form, too"),
    (r"^anthropic (no messages|messages text): status 400 for 200$", "a conversation must be a list"),
    (r"^(array|text body).*: status 400 for 200$", "a body must be an object"),
    (r"^slot outside: status 400 for 200$", "a slot that does not exist is an error"),
    (r"^(tokenize|detokenize) null: status 200 for 400$", "null counts as absent in every field"),
    (r"^chat tools logprobs stream: status 200 for 400$", "a stream with tools has log-probabilities, too"),
    (r"^responses calls: missing output\[\]", "the markup of a call that a limit cuts is no content"),
    (r"^anthropic use: missing content\[\]", "the markup of a call that a limit cuts is no content"),
    (r"^seed=text: status 200 for 400$", "any text is a seed of its own"),
]


class Reply(NamedTuple):
    status: int
    kind: str
    body: bytes


@pytest.fixture(scope="module")
def addresses(peer_bin: Path, smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Ours and theirs, both ready."""
    folder = tmp_path_factory.mktemp("differences")
    programs = [[sys.executable, "-m", "llamado", "serve"], [str(peer_bin / "llama-server"), "-ngl", "0"]]
    processes, urls = [], []
    try:
        for i, program in enumerate(programs):
            (folder / f"slots{i}").mkdir()
            port = free_port()
            options = ["-m", smollm2_path, "-a", "m", "-c", "4096", "-np", "4", "-t", "1", "--metrics", "--props"]
            options += ["--slot-save-path", folder / f"slots{i}", "--host", "127.0.0.1", "--port", port]
            with (folder / f"log{i}").open("wb") as log:
                processes.append(subprocess.Popen([*program, *map(str, options)], stdout=log, stderr=log))
            urls.append(f"http://127.0.0.1:{port}")
        for i, url in enumerate(urls):
            while not _healthy(url):
                assert processes[i].poll() is None, (folder / f"log{i}").read_text(errors="replace")[-2000:]
                time.sleep(0.05)
        yield urls
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(GUARD)
            except subprocess.TimeoutExpired:
                process.kill()


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def _ask_all(url: str, asks: list[Ask]) -> list[Reply]:
    replies = []
    with httpx.Client(base_url=url, timeout=60) as http:
        for ask in asks:
            headers = {"Content-Type": "application/json"} if ask.body is not None else {}
            try:
                answer = http.request(ask.method, ask.path, content=ask.body, headers=headers)
            except httpx.RemoteProtocolError:  # llama-server ends its connections after 100 requests, unannounced
                answer = http.request(ask.method, ask.path, content=ask.body, headers=headers)
            kind = answer.headers.get("content-type", "").partition(";")[0]
            replies.append(Reply(answer.status_code, kind, answer.content))
    return replies


def shape(value: Any, path: str = "") -> set[str]:
    """Every path of a JSON value with its type; the elements of a list count as one."""
    if isinstance(value, dict):
        return {f"{path}:object"}.union(*(shape(v, f"{path}.{k}" if path else k) for k, v in value.items()))
    if isinstance(value, list):
        return {f"{path}:array"}.union(*(shape(v, f"{path}[]") for v in value))
    kind = {bool: "boolean", int: "number", float: "number", str: "string", type(None): "null"}[type(value)]
    return {f"{path}:{kind}"}


def _events(body: bytes) -> list[tuple[str, Any]]:
    """Name and data of each event of a stream."""
    found = []
    for part in body.decode().split("\n\n"):
        fields = dict(line.partition(": ")[::2] for line in part.split("\n") if ": " in line)
        if "data" in fields:
            data = fields["data"]
            found.append((fields.get("event", ""), data if data == "[DONE]" else orjson.loads(data)))
    return found


def _kinds(events: list[tuple[str, Any]]) -> list[str]:
    """The order of the kinds of events; repeated ones count once."""
    kinds: list[str] = []
    for name, data in events:
        kind = name or ("[DONE]" if data == "[DONE]" else "data")
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
    return kinds


def _texts(value: Any) -> str:
    """Return all texts of an answer, whatever the API calls them."""
    if isinstance(value, list):
        return "".join(map(_texts, value))
    if not isinstance(value, dict):
        return ""
    said = ""
    for key in ("content", "text", "delta", "prompt", "tokens"):
        part = value.get(key)
        if key == "tokens" or (key == "prompt" and "content" in value):
            said += str(part) if key == "tokens" and "content" not in value and part is not None else ""
        else:
            said += part if isinstance(part, str) else _texts(part)
    for key in ("choices", "message", "output"):
        said += _texts(value.get(key))
    return said


# What is counted and why an answer ended, under all the names the APIs have for it.
_FIGURES = frozenset(
    {
        "finish_reason", "stop_reason", "stop_sequence", "stop_type", "stopping_word", "status", "truncated",
        "completion_tokens", "prompt_tokens", "total_tokens", "output_tokens", "predicted_n", "tokens_predicted",
        "tokens_evaluated",
    }
)  # fmt: skip


def figures(value: Any, path: str = "") -> list[str]:
    """All counts and reasons of an answer, in order; what a cache saved depends on what came before and is added up."""
    if isinstance(value, list):
        return [found for item in value for found in figures(item, path)]
    if not isinstance(value, dict):
        return []
    found = [f"{path}{key}={value[key]!r}" for key in sorted(_FIGURES & value.keys()) if value[key] is not None]
    for whole, cached in (("prompt_n", "cache_n"), ("input_tokens", "cache_read_input_tokens")):
        if whole in value:
            found.append(f"{path}{whole}+cached={value[whole] + value.get(cached, 0)}")
    for key, inner in value.items():
        if key != "generation_settings":
            found += figures(inner, f"{path}{key}.")
    return sorted(found) if not path else found


def _differences(ask: Ask, ours: Reply, theirs: Reply) -> Iterator[str]:
    if ours.status != theirs.status:
        yield f"status {ours.status} for {theirs.status}"
        return
    if ours.kind != theirs.kind:
        yield f"content type {ours.kind} for {theirs.kind}"
        return
    if ours.kind == "text/event-stream":
        a, b = _events(ours.body), _events(theirs.body)
        if _kinds(a) != _kinds(b):
            yield f"events {_kinds(a)} for {_kinds(b)}"
        yield from _compare_json(ask, [e for _, e in a if e != "[DONE]"], [e for _, e in b if e != "[DONE]"])
    elif ours.kind == "application/json":
        yield from _compare_json(ask, orjson.loads(ours.body), orjson.loads(theirs.body))


def _compare_json(ask: Ask, ours: Any, theirs: Any) -> Iterator[str]:
    a, b = shape(ours), shape(theirs)
    for path in sorted(b - a):
        yield f"missing {path}"
    for path in sorted(a - b):
        yield f"extra {path}"
    if isinstance(ours, dict) and isinstance(theirs, dict) and "error" in theirs:
        kinds = [e.get("type") if isinstance(e, dict) else e for e in (ours.get("error"), theirs["error"])]
        if kinds[0] != kinds[1]:
            yield f"error {kinds[0]} for {kinds[1]}"
    if ask.greedy and _texts(ours) != _texts(theirs):
        yield f"text {_texts(ours)!r} for {_texts(theirs)!r}"
    elif ask.greedy and (a_figures := figures(ours)) != (b_figures := figures(theirs)):
        yield f"figures {sorted({*a_figures} - {*b_figures})} for {sorted({*b_figures} - {*a_figures})}"


def test_all_differences_are_explained(addresses: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    asks = all_requests()
    with ThreadPoolExecutor(2) as pool:
        ours, theirs = pool.map(_ask_all, addresses, [asks, asks])
    reasons: Counter[str] = Counter()
    unexplained, n_equal = [], 0
    for ask, a, b in zip(asks, ours, theirs, strict=True):
        differences = [f"{ask.name}: {difference}" for difference in _differences(ask, a, b)]
        n_equal += not differences
        for difference in differences:
            reason = next((why for pattern, why in EXPLAINED if re.search(pattern, difference)), None)
            if reason is None:
                unexplained.append(f"{difference}    [{a.body[:150]!r} for {b.body[:150]!r}]")
            else:
                reasons[reason] += 1
    with capsys.disabled():
        print(f"\n{len(asks)} requests, {n_equal} with equal answers; differences by reason:")
        for reason, n in reasons.most_common():
            print(f"{n:5} {reason}")
    assert not unexplained, f"{len(unexplained)} differences:\n" + "\n".join(unexplained)
