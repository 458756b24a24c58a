"""`/infill` over the fake engine: bytes are tokens; 3, 4 and 5 are the fill-in-the-middle tokens."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import FakeEngine, FakeTokenizer, post

from llamado.server.api.infill import PromptBudget, infill_prompt

BUDGET = PromptBudget(n_ctx=4096, n_batch=64, n_predict=-1)
BODY = {"input_prefix": "ab", "input_suffix": "yz"}


def ask(body: dict[str, Any], engine: FakeEngine, **switches: Any) -> tuple[int, Any]:
    return post("/infill", body, engine, **switches)


def build(body: dict[str, Any], budget: PromptBudget = BUDGET, *, suffix_first: bool = False, **tokens: Any) -> bytes:
    tokenizer = FakeTokenizer()
    for name, value in tokens.items():
        setattr(tokenizer, name, value)
    return bytes(infill_prompt(body, tokenizer, budget, suffix_first=suffix_first))


def test_prefix_suffix_and_middle() -> None:
    engine = FakeEngine()
    status, answer = ask({**BODY, "n_predict": 3}, engine)
    assert status == 200 and answer["content"] == "Hel"
    assert bytes(engine.requests[0].prompt) == b"\x03ab\x04yz\x05"
    engine = FakeEngine()
    ask({**BODY, "prompt": "c"}, engine, spm_infill=True)
    assert bytes(engine.requests[0].prompt) == b"\x04yz\x03abc\x05"


def test_context_files() -> None:
    files = [{"filename": "a.py", "text": "A"}, {"text": "B"}]
    assert build({**BODY, "input_extra": files}) == (
        b"\n\n--- snippet ---\n\nA\n\n--- snippet ---\n\nB\x03ab\x04yz\x05"
    )
    repository = build({**BODY, "input_extra": files}, fim_rep=6, fim_sep=7, add_bos=True)
    assert repository == b"\x06myproject\n\x07a.py\nA\x07tmp\nB\x07filename\n\x02\x03ab\x04yz\x05"
    # The beginning of context that does not fit is cut.
    assert build({**BODY, "input_extra": files}, PromptBudget(n_ctx=66, n_batch=64, n_predict=-1)).startswith(
        b"-\n\nB\x03"
    )


def test_prefix_and_suffix_share_a_batch() -> None:
    prompt = build({"input_prefix": "p" * 99 + "!", "input_suffix": "?" + "s" * 99, "prompt": "xx"})
    assert prompt == b"\x03" + b"p" * 47 + b"!xx\x04?" + b"s" * 11 + b"\x05"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, '"input_prefix" is required'),
        ({"input_prefix": "a"}, '"input_suffix" is required'),
        ({**BODY, "prompt": 3}, '"prompt" must be a string'),
        ({**BODY, "input_extra": "x"}, '"input_extra" must be an array'),
        ({**BODY, "input_extra": [{}]}, '"text" field'),
        ({**BODY, "input_extra": [{"text": "a", "filename": 3}]}, '"filename" field'),
        ({**BODY, "input_prefix": {}}, "type must be string"),
    ],
)
def test_bad_bodies(body: dict[str, Any], message: str) -> None:
    status, answer = ask(body, FakeEngine())
    assert status == 400 and message in answer["error"]["message"]


def test_missing_fim_tokens_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTokenizer, "fim_suf", None)
    status, answer = ask(BODY, FakeEngine())
    assert status == 501 and answer["error"]["message"].endswith("suffix token is missing. ")
