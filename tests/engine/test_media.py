"""Media in prompts, with embeddings of known tokens: the engine must answer as to a prompt with these tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import GUARD, until

from llamado.engine.cache import disk_cache
from llamado.engine.cache.prompt_cache import CellReader, ReadRate
from llamado.engine.drafts.drafts import DraftManager, DraftRequest
from llamado.engine.drafts.pending_draft import PendingDraft
from llamado.engine.drafts.suffix import Suffix
from llamado.engine.engine import Engine
from llamado.engine.errors import InvalidRequest
from llamado.engine.media.stage import MediaStage
from llamado.engine.request import Failure, Request, Result
from llamado.engine.sampling.chain import Sampler
from llamado.errors import LlamadoError
from llamado.media.chunks import Grid, MediaSpan
from llamado.models.memory import KeysValues

from .fake import ALL, STATE, FakeForward, FakeTokenizer, ask, new_engine, req, send, settled
from .fake_media import FakeEncoder, chunk_of, media_req, stage, with_media

KINDS: dict[str, tuple[Any, ...]] = {"all": (ALL,), "window": (ALL, KeysValues(1, 1, 24)), "states": (ALL, STATE)}
PROMPT = [1 + (7 * i) % 89 for i in range(150)]
PLACES = (10, 40), (40, 55), (100, 130)

Start = Callable[..., Engine]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make reading always pay, so that tests do not depend on the clock."""
    monkeypatch.setattr(CellReader, "pays", lambda self, handle, pace: True)
    monkeypatch.setattr(ReadRate, "pays", lambda self, n_bytes, n, pace: True)
    monkeypatch.setattr(disk_cache, "_LOOK_SECONDS", 0.01)


@pytest.fixture(params=KINDS)
def layers(request: pytest.FixtureRequest) -> Any:
    return KINDS[request.param]


@pytest.fixture
def start(layers: Any, exits: ExitStack) -> Start:
    def build(encoder: FakeEncoder | None = None, *, drafts: DraftManager | None = None, **options: Any) -> Engine:
        sizes = {"n_cells": 4096, "n_sequences": 4, "n_drafted": int(drafts is not None)}
        forward = FakeForward(layers=layers, **{**sizes, **options.pop("sizes", {})})
        given = {"n_ctx": 512, "n_slots": 4, **options}
        media = stage(encoder or FakeEncoder())
        return exits.enter_context(
            closing(new_engine(forward, FakeTokenizer(eog=()), drafts=drafts, media=media, **given))
        )

    return build


def expected(layers: Any, prompt: list[int], n_predict: int = 8, **options: Any) -> list[int]:
    """Return the answer to a prompt of text from an engine of its own."""
    key = repr((layers, prompt, n_predict, options))
    if key not in _answers:
        forward = FakeForward(n_cells=4096, layers=layers)
        with closing(new_engine(forward, FakeTokenizer(eog=()), **{"n_ctx": 512, **options})) as engine:
            _answers[key] = ask(engine, req(prompt, n_predict)).tokens
    return _answers[key]


_answers: dict[str, list[int]] = {}


def test_answer_is_that_of_the_tokens(start: Start, layers: Any) -> None:
    """Chunks at the begin, in the middle, next to each other and at the end of a prompt."""
    engine, wanted = start(), expected(layers, PROMPT)
    for places in [PLACES, ((0, 30),), ((140, 150),), ((0, 150),), ((0, 1), (149, 150))]:
        result = ask(engine, media_req(PROMPT, *places, cache_prompt=False))
        assert result.tokens == wanted, places
        assert (result.n_prompt, result.timings.prompt_n) == (150, 150)


def test_media_and_text_share_no_batch(start: Start) -> None:
    engine = start()
    clients = [send(engine, media_req([i, *PROMPT], (5 * i, 60 + i), n_predict=30)) for i in range(1, 5)]
    for client in clients:
        client.wait()
    assert set(engine._forward.embedded) == {True, False}  # type: ignore[attr-defined]


def test_many_requests_get_the_answers_they_get_alone(start: Start, layers: Any) -> None:
    engine = start(n_slots=3)
    prompts = [[i + 1, *PROMPT[: 40 + 13 * i]] for i in range(7)]
    places = [(), ((0, 9),), ((3, 40),), ((20, 30), (30, 55)), (), ((1, 50),), ((2, 119),)]
    clients = [send(engine, media_req(p, *at, n_predict=24)) for p, at in zip(prompts, places, strict=True)]
    for prompt, client in zip(prompts, clients, strict=True):
        assert client.result.tokens == expected(layers, prompt, 24)


def test_cells_of_the_same_media_are_reused(start: Start, layers: Any) -> None:
    encoder = FakeEncoder()
    engine = start(encoder)
    first = ask(engine, media_req(PROMPT, *PLACES))
    assert len(encoder.begun) == 3
    longer = [*PROMPT, *first.tokens, 5, 6, 7]
    again = ask(engine, media_req(longer, *PLACES))
    assert again.tokens == expected(layers, longer)
    assert again.n_cached >= 130 and len(encoder.begun) == 3
    other = [*PROMPT[:100], *range(1, 31), *PROMPT[130:]]
    changed = ask(engine, media_req(other, *PLACES))
    assert changed.tokens == expected(layers, other)
    assert changed.n_cached <= 100
    # text in place of media shares nothing behind the place
    assert ask(engine, req(PROMPT)).tokens == first.tokens


def test_prefix_ends_before_a_chunk_that_is_not_all_of_it(start: Start, layers: Any) -> None:
    """A slot that stopped within a chunk, here because its request was cancelled, keeps none of the chunk."""
    encoder = FakeEncoder()
    engine = start(encoder, n_slots=1, sizes={"max_batch": 16})
    forward: Any = engine._forward
    sizes: list[int] = []

    def stop(n: int) -> None:
        sizes.append(n)
        if len(sizes) == 4:  # 32 tokens of text, 32 of the chunk
            engine.cancel(0)

    forward.before = stop
    send(engine, media_req(PROMPT, (32, 112)))
    until(lambda: len(sizes) == 4)
    settled(engine)
    forward.before = None
    result = ask(engine, media_req(PROMPT, (32, 112)))
    assert result.n_cached == (32 if len(layers) == 1 else result.n_cached) and result.n_cached <= 32
    assert result.tokens == expected(layers, PROMPT)


def test_requests_with_the_same_media_share_it(start: Start, layers: Any) -> None:
    encoder = FakeEncoder()
    engine = start(encoder)
    prompts = [[*PROMPT, i] for i in range(1, 5)]
    clients = [send(engine, media_req(p, *PLACES)) for p in prompts]
    for prompt, client in zip(prompts, clients, strict=True):
        assert client.result.tokens == expected(layers, prompt)
    assert len(encoder.begun) == 3
    assert sum(client.result.n_cached for client in clients) >= 300


def test_equal_chunks_of_one_prompt_are_encoded_once(start: Start, layers: Any) -> None:
    encoder = FakeEncoder()
    engine = start(encoder)
    prompt = [*range(1, 40), *range(1, 40), *range(1, 40)]
    result = ask(engine, media_req(prompt, (0, 39), (78, 117)))
    assert result.tokens == expected(layers, prompt) and len(encoder.begun) == 1


def test_prompt_cache_keeps_media(start: Start, layers: Any) -> None:
    encoder = FakeEncoder()
    engine = start(encoder, n_slots=1, cache_ram=-1)
    wanted = ask(engine, media_req(PROMPT, *PLACES)).tokens
    ask(engine, req([*range(60, 20, -1), *range(60, 20, -1)]))  # takes the slot
    entries = engine.snapshot().stored
    assert entries and all(min(entry.begins) >= 0 for entry in entries)
    again = ask(engine, media_req([*PROMPT, 3], *PLACES))
    assert again.tokens == expected(layers, [*PROMPT, 3]) and again.n_cached >= 130
    assert len(encoder.begun) == 3
    assert ask(engine, media_req(PROMPT, *PLACES)).tokens == wanted


def test_disk_cache_keeps_media(start: Start, layers: Any, tmp_path: Path) -> None:
    options = {"cache_ram": -1, "cache_disk": str(tmp_path / "c"), "cache_disk_size": 1 << 30, "n_slots": 1}
    first = start(**options)
    wanted = ask(first, media_req(PROMPT, *PLACES)).tokens
    first.close()
    encoder = FakeEncoder()
    second = start(encoder, **options)
    disk = second.disk
    assert disk is not None
    until(lambda: disk._looked is not None)
    again = ask(second, media_req([*PROMPT, 3], *PLACES))
    assert again.tokens == expected(layers, [*PROMPT, 3])
    assert again.n_cached >= 130 and not encoder.begun
    assert ask(second, media_req(PROMPT, *PLACES, cache_prompt=False)).tokens == wanted


def test_disk_cache_that_ends_within_a_chunk(start: Start, layers: Any, tmp_path: Path) -> None:
    """The end of the sequence on disk is lost; what is left ends within a chunk, which is computed whole."""
    prompt = [1 + (5 * i) % 89 for i in range(400)]
    options = {"cache_ram": -1, "cache_disk": str(tmp_path / "c"), "cache_disk_size": 1 << 30, "n_slots": 1}
    first = start(**options)
    ask(first, media_req(prompt, (200, 390)))
    first.close()
    blocks = sorted((tmp_path / "c").glob("*.cells"), key=lambda path: path.stat().st_size)
    blocks[0].unlink()  # the rest behind the first 256 tokens
    encoder = FakeEncoder()
    second = start(encoder, **options)
    disk = second.disk
    assert disk is not None
    until(lambda: disk._looked is not None)
    again = ask(second, media_req(prompt, (200, 390)))
    assert again.tokens == expected(layers, prompt)
    assert again.n_cached in ((200,) if len(layers) == 1 else (0, 200)) and len(encoder.begun) == 1


def test_chunk_whose_end_cannot_be_read_is_computed_whole(exits: ExitStack, tmp_path: Path) -> None:
    """A damaged file ends the read from disk within a chunk whose tokens see each other."""
    prompt = [1 + (5 * i) % 89 for i in range(400)]
    ids, spans = with_media(prompt, (200, 390), causal=False)
    options = {"cache_ram": -1, "cache_disk": str(tmp_path / "c"), "cache_disk_size": 1 << 30, "n_ctx": 512}
    for name in ("first", "second"):
        forward = FakeForward(n_cells=1024, max_batch=256)
        engine = new_engine(forward, FakeTokenizer(eog=()), media=stage(), **options)
        exits.callback(engine.close)
        disk = engine.disk
        assert disk is not None
        until(lambda: disk._looked is not None)  # noqa: B023
        result = ask(engine, req(ids, media=spans))
        whole = [n for n, embedded in zip(forward.sizes, forward.embedded, strict=True) if embedded]
        assert whole == [190] and result.n_cached == 0, name
        assert result.tokens == expected((ALL,), prompt)
        engine.close()
        damaged = min((tmp_path / "c").glob("*.cells"), key=lambda path: path.stat().st_size)
        data = bytearray(damaged.read_bytes())
        data[-1] ^= 1
        damaged.write_bytes(data)


def test_slot_file_keeps_media(start: Start, layers: Any, tmp_path: Path) -> None:
    first = start(n_slots=1)
    longer = [*PROMPT, *ask(first, media_req(PROMPT, *PLACES)).tokens, 3]
    first.save_slot(0, tmp_path / "slot").result(GUARD)
    encoder = FakeEncoder()
    second = start(encoder, n_slots=1)
    second.restore_slot(0, tmp_path / "slot").result(GUARD)
    again = ask(second, media_req(longer, *PLACES))
    assert again.tokens == expected(layers, longer)
    assert again.n_cached >= 150 and not encoder.begun


def test_answers_with_drafts_are_those_without(start: Start, layers: Any) -> None:
    engine = start(drafts=DraftManager([Suffix()]))
    prompt = [*range(1, 25)] * 5
    for _ in range(2):
        result = ask(engine, media_req(prompt, (24, 48), (72, 96), n_predict=60))
        assert result.tokens == expected(layers, prompt, 60)


def test_drafts_repeat_text_and_never_media(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = DraftManager([Suffix()])
    monkeypatch.setattr(manager.cost, "drafts", lambda n: True)
    monkeypatch.setattr(manager.cost, "least_gain", lambda *given: 0.0)
    line = [*range(1, 25)]
    ids, _ = with_media(line * 5, (24, 48), (72, 96))
    state = manager.follow(PendingDraft(), lambda logits, place: 0, media=True)
    tokens = np.array(ids, np.int32)
    for length in (100, 120):
        state.ahead.drop()
        found = manager.propose([DraftRequest(state, tokens, length, 20, length)], 1)[0]
        assert (found is not None and found.tokens[:4] == line[length % 24 :][:4]) or length == 120
        assert min(state.history) > 0 and min(found.tokens if found else [1]) > 0
    assert state.history == line * 3


def test_samplers_see_the_text_alone(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Sequence[int]] = []
    begin = Sampler.start
    monkeypatch.setattr(Sampler, "start", lambda self, tokens: (started.append(tokens), begin(self, tokens))[1])
    engine = start()
    ids, spans = with_media(PROMPT, *PLACES)
    seen: list[list[int]] = []

    def look(tokens: Any, logits: Any) -> bool:
        seen.append(tokens.tolist())
        return False

    result = ask(engine, req(ids, 30, media=spans, until=look, repeat_penalty=1.5, repeat_last_n=-1))
    text = [token for token in ids if token >= 0]
    assert started == [text] and seen[0] == text and seen[-1] == [*text, *result.tokens[:-1]]


@pytest.mark.parametrize("n_keep", [0, 20, 50])
def test_context_shift_drops_whole_chunks(start: Start, layers: Any, n_keep: int) -> None:
    """The sequence behind a shift is that of the text, with the tokens of whole chunks dropped."""
    encoder = FakeEncoder()
    engine = start(encoder, context_shift=True, n_ctx=96, n_slots=1)
    prompt = PROMPT[:80]
    places = (10, 30), (40, 56), (60, 70)
    result = ask(engine, media_req(prompt, *places, n_predict=40, n_keep=n_keep))
    assert result.truncated and len(result.tokens) == 40
    # by hand: 95 tokens are in the slot at the shift; half of those behind n_keep go
    generated = 96 - 80 - 1
    sequence = [*prompt, *result.tokens[: generated + 0]]
    kept = {0: 0, 20: 10, 50: 40}[n_keep]
    end = n_keep + (len(sequence) - n_keep) // 2
    end = next((stop for start_, stop in places if start_ < end < stop), end)
    rest = [*sequence[:kept], *sequence[end:], result.tokens[generated]]
    follow = expected(layers, rest, 5)
    del follow  # sampling places differ; the engine's own cells are checked below instead
    slot = engine._slots[0]
    tokens = slot.tokens[: slot.length]
    for span in slot.spans:
        assert tokens[span.start : span.stop].tolist() == span.chunk.token_ids().tolist()
    assert int((tokens < 0).sum()) == sum(span.chunk.n_tokens for span in slot.spans)


def test_context_shift_continues_as_the_shifted_sequence(start: Start, layers: Any) -> None:
    """A greedy answer behind a shift is that of the text with the same tokens and the same tokens dropped."""
    places = (20, 40), (50, 60)
    # the middle of the discarded part falls between chunks, so that text is shifted alike
    options = {"n_ctx": 96, "context_shift": True}
    ids, spans = with_media(PROMPT[:80], *places)
    engine = start(n_slots=1, **options)
    result = ask(engine, req(ids, 40, media=spans, n_keep=10, n_discard=38, temperature=0))
    forward = FakeForward(n_cells=4096, layers=layers)
    with closing(new_engine(forward, FakeTokenizer(eog=()), **options)) as plain:
        wanted = ask(plain, req(PROMPT[:80], 40, n_keep=10, n_discard=38, temperature=0))
    assert result.truncated and result.tokens == wanted.tokens


def test_answer_ends_if_a_shift_would_drop_everything(start: Start) -> None:
    engine = start(context_shift=True, n_ctx=96, n_slots=1)
    result = ask(engine, media_req(PROMPT[:94], (1, 94), n_predict=40))
    assert result.truncated and result.stop_type == "limit"


def test_decoding_continues_while_media_are_encoded(start: Start) -> None:
    """One segment runs per step: a generating slot gets a token for each."""
    encoder = FakeEncoder(n_segments=30)
    engine = start(encoder)
    talker = send(engine, req([1, 2, 3], 200))
    until(lambda: talker.tokens)
    at: list[int] = []
    encoder.before = lambda: at.append(len(talker.tokens))
    client = send(engine, media_req(PROMPT, (5, 50)))
    client.wait()
    assert len(at) == 30 and at[-1] - at[0] >= 25
    talker.wait()


def test_cancelled_request_stops_encoding(start: Start) -> None:
    encoder = FakeEncoder(n_segments=10_000)
    engine = start(encoder)
    steps: list[float] = []

    def step() -> None:
        steps.append(time.monotonic())
        if len(steps) == 5:
            engine.cancel(client.id)

    encoder.before = step
    client = send(engine, media_req(PROMPT, (5, 50)))
    until(lambda: len(steps) >= 5)
    settled(engine)
    assert len(steps) <= 6 and not engine._media.is_busy
    encoder.before = lambda: None
    encoder.n_segments = 1
    assert ask(engine, media_req(PROMPT, (5, 50))).tokens


def test_failed_encoding_fails_its_requests_only(start: Start) -> None:
    encoder = FakeEncoder()
    engine = start(encoder)

    def fail() -> None:
        raise ZeroDivisionError("broken")

    encoder.before = fail
    text = send(engine, req(PROMPT, 20))
    events = send(engine, media_req(PROMPT, (5, 50))).wait().events
    failure = events[-1]
    assert isinstance(failure, Failure) and "encoding failed: ZeroDivisionError: broken" in str(failure.error)
    assert isinstance(failure.error, LlamadoError)
    assert text.result.tokens
    encoder.before = lambda: None
    assert ask(engine, media_req(PROMPT, (5, 50))).tokens


def test_bad_embeddings_fail_the_request(start: Start) -> None:
    encoder = FakeEncoder(lambda ids: np.full((ids.size, 1), np.nan, np.float32))
    engine = start(encoder)
    failure = send(engine, media_req(PROMPT, (5, 50))).wait().events[-1]
    assert isinstance(failure, Failure) and "NaN or infinity" in str(failure.error)
    encoder.table = lambda ids: np.zeros((ids.size - 1, 1), np.float32)
    failure = send(engine, media_req(PROMPT, (5, 50))).wait().events[-1]
    assert isinstance(failure, Failure) and "44 embeddings for 45 tokens" in str(failure.error)


def test_results_are_kept_up_to_a_limit(layers: Any) -> None:
    encoder = FakeEncoder(n_segments=1)
    kept = MediaStage(encoder, limit=4 * 25)

    class Requester:
        def __init__(self) -> None:
            self.embeddings: dict[bytes, Any] = {}

    chunks = [chunk_of([i] * 10) for i in range(3)]
    for chunk in chunks:
        one = Requester()
        assert not kept.provide(one, chunk)
        kept.advance()
        assert kept.provide(one, chunk) and chunk.digest in one.embeddings
    assert [kept.provide(Requester(), chunk) for chunk in (chunks[2], chunks[1])] == [True, True]
    one = Requester()
    assert not kept.provide(one, chunks[0])
    kept.advance()
    assert [kept.provide(Requester(), chunk) for chunk in chunks] == [True, True, False], "the least recently used goes"


def bad(change: Callable[[list[int], tuple[MediaSpan, ...]], tuple[list[int], Any]]) -> Request:
    ids, spans = change(*with_media(PROMPT, *PLACES))
    return req(ids, media=spans)


@pytest.mark.parametrize(
    "request_",
    [
        bad(lambda ids, spans: (ids, ())),
        bad(lambda ids, spans: (ids, spans[:2])),
        bad(lambda ids, spans: (ids, (spans[1], spans[0], spans[2]))),
        bad(lambda ids, spans: (ids, (spans[0]._replace(start=9), *spans[1:]))),
        bad(lambda ids, spans: (ids[:120], spans)),
        bad(lambda ids, spans: (PROMPT, spans)),
        bad(lambda ids, spans: ([500, *ids[1:]], spans)),
        bad(lambda ids, spans: ([-5, *ids[1:]], spans)),
        bad(lambda ids, spans: (ids, (spans[0]._replace(start=-1), *spans[1:]))),
    ],
)
def test_invalid_media_are_rejected(request_: Request, exits: ExitStack) -> None:
    engine = exits.enter_context(closing(new_engine(FakeForward(), FakeTokenizer(), media=stage())))
    with pytest.raises(InvalidRequest):
        send(engine, request_)


def test_engine_without_encoder_rejects_media(exits: ExitStack) -> None:
    engine = exits.enter_context(closing(new_engine(FakeForward(), FakeTokenizer())))
    with pytest.raises(InvalidRequest, match="--mmproj"):
        send(engine, media_req(PROMPT, *PLACES))


def test_chunk_that_exceeds_the_batch_is_rejected_if_its_tokens_see_each_other(exits: ExitStack) -> None:
    engine = exits.enter_context(closing(new_engine(FakeForward(max_batch=16), FakeTokenizer(), media=stage())))
    ids, spans = with_media(PROMPT, (5, 22), causal=False)
    with pytest.raises(InvalidRequest, match=r"an image of 17 tokens must be evaluated in one batch.* at most 16"):
        send(engine, req(ids, media=spans))
    recurrent = FakeForward(layers=(ALL, STATE), n_sequences=1)
    engine = exits.enter_context(closing(new_engine(recurrent, FakeTokenizer(), media=stage())))
    with pytest.raises(InvalidRequest, match="recurrent layers"):
        send(engine, req(ids, media=spans))


def test_grid_moves_the_positions_behind_it() -> None:
    """In models with M-RoPE text goes on behind the larger side of the picture, wherever the chunk is cut."""
    from llamado.engine.media.spans import chunk_positions, position_shift

    _, spans = with_media(PROMPT, (10, 40), (50, 56), layout=lambda n: Grid(n // 3, 3))
    assert [position_shift(spans, at) for at in (0, 10, 40, 49, 50, 56, 99)] == [0, 0, -20, -20, -20, -23, -23]
    whole = Grid(2, 3).positions(30)
    parts = [chunk_positions(spans, spans[1], first, 2) for first in (50, 52, 54)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)  # type: ignore[arg-type]


def test_result_keeps_the_request(start: Start) -> None:
    result: Result = ask(start(), media_req(PROMPT, *PLACES))
    assert len(result.request.media) == 3


def test_rows_of_a_prompt_are_those_of_its_text(start: Start, layers: Any) -> None:
    """Media positions have no logits, and no probability."""
    engine = start()
    rows: dict[int, bytes] = {}
    text: dict[int, bytes] = {}

    def recorded(found: dict[int, bytes]) -> Callable[[int, Any], None]:
        return lambda place, row: found.__setitem__(place, row.tobytes())

    ids, spans = with_media(PROMPT, *PLACES)
    probs = {"prompt_probs": True, "n_probs": 1, "cache_prompt": False}
    result = ask(engine, req(ids, media=spans, on_prompt_row=recorded(rows), **probs))
    ask(engine, req(PROMPT, on_prompt_row=recorded(text), **probs))
    places = [place for place, token in enumerate(ids) if token >= 0]
    assert [*rows] == places[:-1] and rows == {place: text[place] for place in places[:-1]}
    # the first token has no probability; those behind media are predicted by rows that media do not have
    behind = {span.stop for span in spans}
    assert [found.token.id for found in result.prompt_probs] == [ids[place] for place in places if place not in behind]
