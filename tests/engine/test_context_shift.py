"""Context shift: a full context drops its older half, as in a plain loop that rebuilds the prompt."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import feed_sequence
from tiers import chosen, first_of
from tiny_models import make_gemma3, make_llama

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.jit import Jit
from llamado.engine.drafts.drafts import DraftManager
from llamado.engine.drafts.suffix import Suffix
from llamado.engine.engine import Engine
from llamado.engine.errors import ContextExceeded, InvalidRequest
from llamado.engine.forward.contract import Forward
from llamado.engine.forward.options import RunnerOptions
from llamado.engine.forward.runner import ModelRunner
from llamado.engine.options import EngineOptions
from llamado.engine.request import GenerationParams, Request
from llamado.engine.sampling.chain import Sampler, SamplerSetup
from llamado.engine.sampling.params import Sampling
from llamado.engine.scheduler import outage
from llamado.gguf.reader import GGUFFile
from llamado.models import load_model

from .conftest import OpenModel
from .fake import Client, FakeForward, FakeTokenizer, ask, send
from .test_restore import TWO, Cluster


def last_row(forward: Forward, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return the logits after a sequence that is computed from its first token."""
    return feed_sequence(forward, tokens)


def plain(forward: Forward, request: Request, n_ctx: int, *, bos: bool = False) -> list[int]:
    """Return the answer computed from scratch; a full window loses `n_discard` tokens after `n_keep`."""
    prompt, window, answer = request.prompt, [*request.prompt], list[int]()
    assert request.params.sampling.seed is not None
    sampler = Sampler(request.params.sampling, SamplerSetup(forward.n_vocab, [0]), seed=request.params.sampling.seed)
    sampler.start(prompt)
    while len(answer) < request.params.n_predict:
        token = sampler.sample(last_row(forward, window), len(prompt) + len(answer))
        sampler.accept(token)
        answer.append(token)
        if len(window) + 1 >= n_ctx:
            keep = (len(prompt) if request.params.n_keep < 0 else request.params.n_keep) + bos
            keep = max(0, min(keep, n_ctx - 4))
            left = len(window) - keep
            drop = min(request.params.n_discard or left // 2, left - 1)
            window = window[:keep] + window[keep + drop :]
        window.append(token)
    return answer


def req(prompt: list[int], n_predict: int, **kw: Any) -> Request:
    return Request(
        prompt=prompt,
        params=GenerationParams(
            n_predict=n_predict,
            sampling=Sampling(seed=kw.pop("seed", 7), ignore_eos=True, repeat_penalty=1.1, temperature=1.0),
            **kw,
        ),
    )


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(3, 24),
    st.integers(-1, 30),
    st.sampled_from([0, 0, 1, 3, 100]),
    st.sampled_from([1, 5, 64]),
    st.booleans(),
    st.booleans(),
)
def test_shifted_answers_equal_a_plain_loop(
    seed: int, n_ctx: int, n_keep: int, n_discard: int, max_batch: int, bos: bool, drafting: bool
) -> None:
    """Any `n_keep` and `n_discard`, with neighbors that compete for cells, with and without draft tokens."""
    rng = random.Random(seed)
    tokenizer = FakeTokenizer()
    tokenizer.add_bos = bos
    # few tokens, so that some drafts are right; fewer cells than three full slots need
    with closing(
        Engine(
            FakeForward(512, n_vocab=5, max_batch=max_batch),
            tokenizer,
            EngineOptions(n_slots=3, n_ctx=n_ctx, context_shift=True),
            drafts=DraftManager([Suffix()]) if drafting else None,
        )
    ) as engine:
        requests = [
            req(
                [rng.randrange(1, 5) for _ in range(rng.randrange(1, n_ctx))],
                3 * n_ctx,
                n_keep=n_keep,
                n_discard=n_discard,
                seed=rng.randrange(99),
            )
            for _ in range(3)
        ]
        for request, client in [(request, send(engine, request)) for request in requests]:
            result = client.result
            assert result.tokens == plain(FakeForward(n_vocab=5), request, n_ctx, bos=bos)
            assert result.truncated and result.stop_type == "limit" and result.n_predicted == 3 * n_ctx


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    chosen(
        itertools.product([False, True], [0, 1, 5, -1]),
        [(True, 0), (False, 1), (True, 5), (True, -1)],
        id=lambda case: f"{case[0]}-{case[1]}",
    ),
)
def test_bos_token_is_kept(case: tuple[bool, int]) -> None:
    """A vocabulary that starts sequences with BOS keeps one more token, unless the whole prompt is kept."""
    bos, n_keep = case
    request = req([4, 3, 2, 1, 3, 2, 4, 1], 80, n_keep=n_keep)
    expected = plain(FakeForward(), request, 24, bos=bos)
    assert expected != plain(FakeForward(), request, 24, bos=not bos)
    tokenizer = FakeTokenizer()
    tokenizer.add_bos = bos
    with closing(Engine(FakeForward(), tokenizer, EngineOptions(n_ctx=24, context_shift=True))) as engine:
        assert ask(engine, request).tokens == expected


@pytest.mark.slow
def test_shift_leaves_as_many_cached_tokens_as_llama_server() -> None:
    """llama-server b11434 with `-c 256 --context-shift`: 6 prompt and 1,000 predicted tokens leave 243 cached."""
    with closing(Engine(FakeForward(), FakeTokenizer(), EngineOptions(n_ctx=256, context_shift=True))) as engine:
        result = ask(engine, req([1, 2, 3, 4, 5, 6], 1000))
        assert (result.n_predicted, result.n_tokens_cached, result.truncated) == (1000, 243, True)
        short = ask(engine, req([1, 2, 3], 20))
        assert not short.truncated


def test_prompts_must_fit_the_context_despite_shifting() -> None:
    with closing(Engine(FakeForward(), FakeTokenizer(), EngineOptions(n_ctx=32, context_shift=True))) as engine:
        with pytest.raises(ContextExceeded):
            engine.submit(req([1] * 32, 4), Client())
        with pytest.raises(InvalidRequest, match="n_discard"):
            engine.submit(req([1], 4, n_discard=-1), Client())
        full = req([1] * 31, 70)
        assert ask(engine, full).tokens == plain(FakeForward(), full, 32)


def test_next_request_reuses_the_shifted_sequence() -> None:
    """Afterwards the slot holds exactly the shifted sequence."""
    with closing(Engine(FakeForward(), FakeTokenizer(), EngineOptions(n_ctx=64, context_shift=True))) as engine:
        request = req(list(range(1, 21)), 100, n_keep=10)
        answer = ask(engine, request).tokens
        again = ask(engine, req(list(range(1, 21)), 5))
        assert again.n_cached == 10, "the prompt's first tokens were kept, later ones were replaced"
        assert again.tokens == answer[:5]


def test_endless_answer_can_be_cancelled() -> None:
    with closing(Engine(FakeForward(), FakeTokenizer(), EngineOptions(n_ctx=16, context_shift=True))) as engine:
        client = send(engine, req([1, 2], -1))
        while len(client.events) < 100:
            assert not client.over.wait(0.001)
        engine.cancel(client.id)
        assert ask(engine, req([1, 2], 5)).tokens == plain(FakeForward(), req([1, 2], 5), 16)


# -- real forward passes ---------------------------------------------------------------------------------------------


@pytest.fixture(params=first_of([make_gemma3, make_llama], ids=["gemma3", "llama"]))
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return request.param(tmp_path / "m.gguf", n_layer=2)  # type: ignore[no-any-return]


@pytest.fixture
def forward(open_model: OpenModel, path: Path) -> ModelRunner:
    return open_model(path, n_cells=512, max_batch=64)


@pytest.mark.slow
def test_real_model_shifts_bit_for_bit(forward: ModelRunner) -> None:
    """Three shifts, bit for bit; sampling from the whole vocabulary would reveal a difference in a logit's last bit."""
    request = req(list(range(40, 60)), 100, n_keep=8)
    expected = plain(forward, request, 48)
    with closing(
        Engine(
            forward,
            FakeTokenizer(dict.fromkeys(range(320), b"x")),
            EngineOptions(n_slots=2, n_ctx=48, context_shift=True),
        )
    ) as engine:
        result = ask(engine, request)
        assert result.tokens == expected and result.truncated
        assert result.n_prompt + result.n_predicted > 48 + 3 * 20


@pytest.mark.slow
@pytest.mark.parametrize("after", first_of([31, 30]))
def test_losing_a_worker_around_a_shift_does_not_change_the_answer(
    tmp_path: Path, jit: Jit, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """The worker fails just before the context is shifted, and while the shifted context is evaluated again."""
    monkeypatch.setattr(outage, "_FIRST_PAUSE", 0.01)
    path = make_llama(tmp_path / "m.gguf", n_embd=256, n_ff=512, n_layer=4, n_vocab=300, wtype="Q4_K")
    with GGUFFile.open(path) as file:
        alone = ModelRunner(file, load_model(file), [CpuDevice(1, jit=jit)], RunnerOptions(n_cells=512, max_batch=16))
        request = req(list(range(40, 70)), 60)
        expected = plain(alone, request, 60)
        alone.close()
    cluster = Cluster(path, TWO, jit, n_cells=512, max_batch=16)
    tokenizer = FakeTokenizer(dict.fromkeys(range(300), b"x"))
    engine = Engine(cluster.forward, tokenizer, EngineOptions(n_slots=2, n_ctx=60, context_shift=True))
    n_tokens = 0

    def die(event: object) -> None:
        nonlocal n_tokens
        n_tokens += 1
        if n_tokens == after:
            cluster.device(1).die()

    try:
        assert send(engine, request, die).result.tokens == expected
        assert cluster.asked == ["RPC1"]
    finally:
        engine.close()
        cluster.forward.close()
        cluster.file.close()
