"""Media in small models, with the embeddings of known tokens: the logits have the bits of the same text's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from tiers import chosen, first_of
from tiny import TINY, Tiny, make
from tiny_models import make_gemma3
from waiting import until

from llamado.devices.cpu.jit import Jit
from llamado.devices.split.placement import Placement, SplitOptions
from llamado.engine.cache.prompt_cache import CellReader
from llamado.engine.engine import Engine, EngineParts
from llamado.engine.forward.contract import ForwardError
from llamado.engine.forward.runner import ModelRunner
from llamado.engine.options import EngineOptions
from llamado.engine.request import Request, Result
from llamado.engine.scheduler import outage
from llamado.ggml.graph import Graph
from llamado.media.chunks import Grid, MediaSpan
from llamado.models import ARCHITECTURES
from llamado.models.batch import Batch
from llamado.models.encoder import Encoder
from llamado.models.heads.head import Head
from llamado.models.memory import Span

from .conftest import OpenModel
from .fake import FakeTokenizer, req, send
from .fake_media import FakeEncoder, Table, chunk_of, stage, with_media
from .test_restore import Cluster

Array = NDArray[Any]

DECODERS = [
    name
    for name, tiny in TINY.items()
    if not issubclass(kind := ARCHITECTURES[tiny.architecture].load(), Encoder | Head) and kind.takes_embeddings
]
OTHER_THAN_TEXT = {"gemma3n": 0, "gemma4": 0, "qwen4exp": None}
"""Architectures that look more up by token than the embedding, and the token that stands for media there."""


class AnyTokenizer(FakeTokenizer):
    """A tokenizer for any vocabulary."""

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return b"x"


def table_of(runner: ModelRunner) -> Table:
    """Return the lookup of the embeddings that the model computes for tokens."""
    info = runner.file.tensors["token_embd.weight"]
    data = runner.file.data("token_embd.weight").reshape(info.ne[1], -1)
    table = dequantize(data, GGMLQuantizationType(info.type.value)).reshape(-1, info.ne[0])
    model = runner.model
    factor = 1.0 if model.scales_embeddings else model.hparams.embedding_scale
    scaled = table * np.float32(factor) if factor != 1.0 else table
    wide = np.zeros((len(scaled), model.n_embd_input), np.float32)
    wide[:, : scaled.shape[1]] = scaled
    return lambda ids: wide[ids]


class Models:
    """Engines on small models."""

    def __init__(self, open_model: OpenModel, exits: ExitStack, folder: Path) -> None:
        self._open, self._exits, self._folder = open_model, exits, folder
        self.encoder = FakeEncoder()

    def runner(self, tiny: Tiny, **options: Any) -> ModelRunner:
        path = make(tiny, self._folder / f"{tiny.name}.gguf")
        given = {"n_cells": 512, "max_batch": 32, "n_sequences": 4, "embeddings": True, **options}
        return self._open(path, **given)

    def engine(self, runner: ModelRunner, **options: Any) -> Engine:
        self.encoder = FakeEncoder(table_of(runner))
        media = stage(self.encoder, multi_positions=runner.model.multi_positions)
        given = {"n_ctx": 256, "n_slots": 4, "max_queue": 64, **options}
        return self._exits.enter_context(
            closing(Engine(runner, AnyTokenizer(eog=()), EngineOptions(**given), parts=EngineParts(media)))
        )


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make reading cells always pay, so that tests do not depend on the clock."""
    monkeypatch.setattr(CellReader, "pays", lambda self, handle, pace: True)


@pytest.fixture
def models(open_model: OpenModel, exits: ExitStack, tmp_path: Path) -> Models:
    return Models(open_model, exits, tmp_path)


class Answer:
    """A request under way whose logits are recorded."""

    def __init__(
        self, engine: Engine, prompt: Sequence[int], n: int, spans: Sequence[MediaSpan] = (), **more: Any
    ) -> None:
        self.rows: list[bytes] = []

        def look(tokens: Any, logits: Array) -> bool:
            self.rows.append(logits.tobytes())
            return False

        fields: dict[str, Any] = {"media": tuple(spans), "until": look, **more}
        self.request: Request = req(list(prompt), n, **fields)
        self.client = send(engine, self.request)

    @property
    def logits(self) -> list[bytes]:
        self.result  # noqa: B018
        return self.rows

    @property
    def result(self) -> Result:
        return self.client.result


def tokens(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, 90, n).tolist()


def stand_in(runner: ModelRunner) -> int | None:
    """Return the token that media count as in lookups by token; None if there are none."""
    name = runner.model.architecture
    if name not in OTHER_THAN_TEXT:
        return None
    hashes = getattr(runner.model, "_hashes", None)
    return OTHER_THAN_TEXT[name] if hashes is None else hashes.other


SOME = [name for name in ("gemma3", "gemma4", "qwen2vl", "qwen35", "deepseek2", "granite") if name in DECODERS]


@pytest.mark.parametrize("name", chosen(DECODERS, SOME))
def test_embeddings_of_tokens_give_the_bits_of_tokens(models: Models, name: str) -> None:
    """Batches of all kinds: media cut over batches, at the beginning and end of prompts, and decoding behind them."""
    runner = models.runner(TINY[name])
    other = stand_in(runner)
    prompt = tokens(70)
    if other is not None:
        prompt[5:50] = [other] * 45
        prompt[60:62] = [other] * 2
    engine = models.engine(runner)
    ids, spans = with_media(prompt, (5, 50), (60, 62))
    media = Answer(engine, ids, 4, spans)
    assert media.logits == Answer(engine, prompt, 4).logits
    assert media.result.n_cached == 0


@pytest.mark.parametrize("name", chosen(["llama", "gemma3", "qwen2vl", "qwen35"], ["qwen35"]))
def test_the_same_bits_among_others_and_from_caches(models: Models, name: str) -> None:
    runner = models.runner(TINY[name])
    engine = models.engine(runner, cache_ram=-1, n_slots=3)
    prompts = [tokens(70 + 9 * i, seed=i) for i in range(5)]
    places = [((3, 39),), ((0, 11), (11, 30)), (), ((50, 66),), ((20, 76),)]
    with_spans = [with_media(p, *at) for p, at in zip(prompts, places, strict=True)]
    alone = [Answer(engine, p, 6, cache_prompt=False).logits for p in prompts]
    together = [Answer(engine, ids, 6, spans) for ids, spans in with_spans]
    assert [one.logits for one in together] == alone
    again = [Answer(engine, ids, 6, spans) for ids, spans in with_spans]
    assert [one.logits for one in again] == alone
    assert sum(one.result.n_cached for one in again) > 100


def media_logits(runner: ModelRunner, spans: Sequence[tuple[Span, Array | None]], ids: Array) -> Array:
    """Return the logits of the last token of a sequence computed in the given pieces; an array of embeddings replaces
    the tokens of its piece.
    """
    rows = np.empty(0, np.float32)
    for span, embeddings in spans:
        part = ids[span.first : span.first + span.n]
        more = {} if embeddings is None else {"embeddings": embeddings}
        rows = runner.start(part, [span], np.array([span.n - 1], np.int32), **more).result(60).copy()
        span.handle.used += span.n
    return rows


@pytest.mark.parametrize("name", first_of(["qwen2vl", "qwen35", "qwen3vl"], 2))
def test_positions_of_a_grid(models: Models, name: str) -> None:
    """Media at the positions of a line have the bits of text; those of a grid do not; and text behind a grid has the
    bits of text whose position moved on by its larger side.
    """
    runner = models.runner(TINY[name], max_batch=64)
    table, ids = table_of(runner), np.array(tokens(40), np.int32)
    rows = table(ids[10:24])
    engine = models.engine(runner)

    def pieces(positions: Array | None, shift: int) -> list[tuple[Span, Array | None]]:
        handle = runner.memory.allocate(64)
        assert handle is not None
        return [
            (Span(handle, 0, 10), None),
            (Span(handle, 10, 14, positions=positions), rows),
            (Span(handle, 24, 16, shift=shift), None),
        ]

    line = np.zeros((4, 14), np.int32)
    line[:3] = np.arange(10, 24)
    text = Answer(engine, ids.tolist(), 1, cache_prompt=False).logits[0]
    assert media_logits(runner, pieces(line, 0), ids).tobytes() == text
    expected = media_logits(runner, pieces(Grid(7, 2).positions(10), 7 - 14), ids).tobytes()
    assert expected != text
    chunk = chunk_of(ids[10:24].tolist(), layout=Grid(7, 2))
    prompt = [*ids[:10].tolist(), *chunk.token_ids().tolist(), *ids[24:].tolist()]
    found = Answer(engine, prompt, 8, [MediaSpan(10, chunk)], cache_prompt=False)
    assert found.logits[0] == expected
    # decoding behind it, from the cache, and in small pieces
    longer = [*prompt, *found.result.tokens]
    alone = Answer(engine, longer, 3, [MediaSpan(10, chunk)], cache_prompt=False)
    assert Answer(engine, longer, 3, [MediaSpan(10, chunk)]).logits == alone.logits
    small = models.engine(models.runner(TINY[name], max_batch=4))
    assert Answer(small, prompt, 8, [MediaSpan(10, chunk)]).logits == found.logits


def test_vision_sections_rotate_by_their_own_dimension(models: Models) -> None:
    """A grid that only differs in its rows changes the keys of the pairs of that section."""
    runner = models.runner(TINY["qwen2vl"], max_batch=64)
    ids = np.array(tokens(30), np.int32)
    found = []
    for row in (10, 12):
        positions = np.zeros((4, 12), np.int32)
        positions[:3] = np.arange(10, 22)
        positions[1, 3] = row
        handle = runner.memory.allocate(64)
        assert handle is not None
        parts: list[tuple[Span, Array | None]] = [
            (Span(handle, 0, 10), None),
            (Span(handle, 10, 12, positions=positions), table_of(runner)(ids[10:22])),
            (Span(handle, 22, 8), None),
        ]
        found.append(media_logits(runner, parts, ids).tobytes())
    assert found[0] != found[1]


def test_deepstack_adds_parts_to_the_outputs_of_layers(models: Models) -> None:
    tiny = TINY["qwen3vl"]
    deep = replace(tiny, keys={**tiny.keys, "n_deepstack_layers": 1}, variant="deep")
    runner = models.runner(deep)
    n = tiny.n_embd
    assert runner.model.n_embd_input == 2 * n
    table, ids = table_of(runner), np.array(tokens(12), np.int32)

    def logits(part: Array | None) -> bytes:
        rows = table(ids)
        if part is not None:
            rows[:, n:] = part
        handle = runner.memory.allocate(32)
        assert handle is not None
        return media_logits(runner, [(Span(handle, 0, 12), rows)], ids).tobytes()

    text = Answer(models.engine(runner), ids.tolist(), 1).logits[0]
    assert logits(None) == text
    assert logits(np.float32(0.5)) != text
    handle = runner.memory.allocate(32)
    assert handle is not None
    with pytest.raises(ForwardError, match=f"without embeddings of {2 * n} elements"):
        runner.start(ids, [Span(handle, 0, 12)], np.array([11], np.int32), embeddings=table(ids)[:, :n].copy())


def test_a_chunk_whose_tokens_see_each_other(open_model: OpenModel, exits: ExitStack, tmp_path: Path) -> None:
    """Gemma 3: as computed by hand with one batch of the chunk, alone, among others, and from the cache."""
    path = make_gemma3(tmp_path / "m.gguf", n_swa=16, n_layer=4, wtype="F32")
    runner = open_model(path, n_cells=512, max_batch=64, n_sequences=2)
    table = table_of(runner)
    ids = np.array(tokens(60), np.int32)
    media = stage(FakeEncoder(table))
    engine = exits.enter_context(
        closing(
            Engine(
                runner,
                AnyTokenizer(eog=()),
                EngineOptions(n_ctx=256, n_slots=3, prefill_chunk=16),
                parts=EngineParts(media),
            )
        )
    )

    def by_hand(last: int, bidirectional: bool) -> bytes:
        seen = ids.copy()
        seen[last] = (seen[last] + 1) % 90
        handle = runner.memory.allocate(64)
        assert handle is not None
        rows = table(seen[8:40])
        parts: list[tuple[Span, Array | None]] = [
            (Span(handle, 0, 8), None),
            (Span(handle, 8, 32, bidirectional=bidirectional), rows),
            (Span(handle, 40, 20), None),
        ]
        found = media_logits(runner, parts, seen).tobytes()
        runner.memory.free(handle)
        return found

    same = by_hand(0, True)
    ids[0] = (ids[0] + 1) % 90  # as `by_hand` changed it
    chunk = chunk_of(ids[8:40].tolist(), causal=False)
    prompt = [*ids[:8].tolist(), *chunk.token_ids().tolist(), *ids[40:].tolist()]
    spans = [MediaSpan(8, chunk)]
    found = Answer(engine, prompt, 6, spans)
    assert found.logits[0] == same
    assert found.logits[0] != Answer(engine, ids.tolist(), 1, cache_prompt=False).logits[0]
    # among others, whose batches it shares or waits for, and from the cache
    others = [Answer(engine, tokens(50, seed=i), 150) for i in range(2)]
    until(lambda: all(other.rows for other in others))
    again = Answer(engine, prompt, 6, spans, cache_prompt=False)
    assert again.logits == found.logits
    assert not any(other.client.over.is_set() for other in others), "they ended before the chunk was read"
    cached = Answer(engine, [*prompt, *found.result.tokens], 4, spans)
    fresh = Answer(engine, [*prompt, *found.result.tokens], 4, spans, cache_prompt=False)
    assert cached.logits == fresh.logits and cached.result.n_cached >= 40
    for other in others:
        other.result  # noqa: B018


def test_the_first_token_of_such_a_chunk_sees_the_last(open_model: OpenModel, tmp_path: Path) -> None:
    """Windows reach back only: with windows alone, the first token's row depends on the last one."""
    path = make_gemma3(tmp_path / "m.gguf", n_swa=8, n_layer=1, wtype="F32")
    runner = open_model(path, n_cells=256, max_batch=64)
    table, ids = table_of(runner), np.array(tokens(20), np.int32)

    def first(bidirectional: bool, last: int) -> bytes:
        seen = ids.copy()
        seen[-1] = last
        handle = runner.memory.allocate(32)
        assert handle is not None
        span = Span(handle, 0, 20, bidirectional=bidirectional)
        return runner.start(seen, [span], np.array([0], np.int32), embeddings=table(seen)).result(60).tobytes()

    assert first(True, 5) != first(True, 6)
    assert first(False, 5) == first(False, 6)


def test_batches_of_embeddings_need_no_new_memory(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner for media has room for batches of embeddings from the start, and keeps its graphs with the first one."""
    runner = models.runner(TINY["llama"])
    monkeypatch.setattr(runner, "_make_room_for_embeddings", lambda: pytest.fail("no room for embeddings"))
    ids = np.array(tokens(32), np.int32)
    handle = runner.memory.allocate(32)
    assert handle is not None
    runner.warm_up([1, 32])
    runner.start(ids, [Span(handle, 0, 32)], np.array([31], np.int32), embeddings=table_of(runner)(ids)).result(60)


def test_a_batch_needs_embeddings_of_its_tokens(models: Models) -> None:
    runner = models.runner(TINY["llama"])
    handle = runner.memory.allocate(8)
    assert handle is not None
    rows = runner.memory.place([Span(handle, 0, 2)])[0]
    nothing = np.empty(0, np.int32)
    with pytest.raises(ForwardError, match="without embeddings"):
        runner.submit(Batch(rows.positions, nothing, rows.rows, embeddings=np.zeros((2, 3), np.float32)))


@pytest.mark.parametrize("name", first_of(["llama", "gemma3"]))
def test_the_same_bits_from_several_devices(open_model: OpenModel, exits: ExitStack, tmp_path: Path, name: str) -> None:
    path = make(TINY[name], tmp_path / "m.gguf")
    n_layer = TINY[name].n_layer
    prompt = tokens(60)
    ids, spans = with_media(prompt, (5, 45))
    found = []
    for placement in (None, Placement((*[0] * (n_layer // 2), *[1] * (n_layer - n_layer // 2)), 1)):
        n_devices = 1 if placement is None else 2
        given = {"n_cells": 512, "max_batch": 32, "n_sequences": 2}
        runner = open_model(path, placement=placement, n_devices=n_devices, **given)
        media = stage(FakeEncoder(table_of(runner)))
        engine = exits.enter_context(
            closing(Engine(runner, AnyTokenizer(eog=()), EngineOptions(n_ctx=256, n_slots=2), parts=EngineParts(media)))
        )
        found += [Answer(engine, prompt, 6).logits, Answer(engine, ids, 6, spans).logits]
    assert found == found[:1] * 4


def test_an_answer_goes_on_after_the_loss_of_a_device(
    jit: Jit, tmp_path: Path, exits: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sequence is computed again, with the embeddings that the request holds."""
    monkeypatch.setattr(outage, "_FIRST_PAUSE", 0.002)
    tiny = TINY["qwen2vl"]
    path = make(tiny, tmp_path / "m.gguf")
    chunk = chunk_of(tokens(40), layout=Grid(8, 5))
    prompt = [*tokens(10), *chunk.token_ids().tolist(), *tokens(10)]
    spans = [MediaSpan(10, chunk)]
    cluster = Cluster(path, Placement((1, 2), 2), jit, n_cells=512, max_batch=16)
    exits.callback(cluster.file.close)
    exits.callback(cluster.forward.close)
    encoder = FakeEncoder(table_of(cluster.forward))
    engine = exits.enter_context(
        closing(
            Engine(
                cluster.forward,
                AnyTokenizer(eog=()),
                EngineOptions(n_ctx=256, n_slots=2, split=SplitOptions(failover=30)),
                parts=EngineParts(stage(encoder, multi_positions=True)),
            )
        )
    )
    alone = Answer(engine, prompt, 40, spans, cache_prompt=False)
    assert len(set(alone.logits)) == 40
    for number, when in ((1, 0), (2, 5)):
        count = len(cluster.opened)
        answer = Answer(engine, prompt, 40, spans, cache_prompt=False)
        until(lambda: len(answer.rows) >= when)  # noqa: B023
        cluster.device(number).die()
        # rows of the steps that were repeated are recorded once: each token is drawn once
        assert answer.logits == alone.logits
        assert len(cluster.opened) == count + 1
    assert len(encoder.begun) == 1


def test_a_slot_is_saved_although_its_device_is_lost(jit: Jit, tmp_path: Path, exits: ExitStack) -> None:
    path = make(TINY["llama"], tmp_path / "m.gguf")
    cluster = Cluster(path, Placement((*[1] * (TINY["llama"].n_layer - 1), 2), 2), jit, n_cells=512, max_batch=32)
    exits.callback(cluster.file.close)
    exits.callback(cluster.forward.close)
    media = stage(FakeEncoder(table_of(cluster.forward)))
    engine = exits.enter_context(
        closing(
            Engine(
                cluster.forward,
                AnyTokenizer(eog=()),
                EngineOptions(n_ctx=256, split=SplitOptions(failover=30)),
                parts=EngineParts(media),
            )
        )
    )
    prompt = tokens(60)
    ids, spans = with_media(prompt, (5, 45))
    first = Answer(engine, ids, 4, spans)
    longer = [*ids, *first.result.tokens, 7]
    assert engine.save_slot(0, tmp_path / "a").result(60).n_tokens == 63
    device = cluster.device(1)

    def die(what: str) -> None:
        if what == "read":
            device.die()

    device.before = die
    assert engine.save_slot(0, tmp_path / "b").result(60).n_tokens == 63
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    engine.erase_slot(0).result(60)
    engine.restore_slot(0, tmp_path / "b").result(60)
    restored = Answer(engine, longer, 4, spans)
    assert restored.logits == Answer(engine, longer, 4, spans, cache_prompt=False).logits
    assert restored.result.n_cached == 63


def test_batches_of_media_do_not_overtake_those_of_text(open_model: OpenModel, tmp_path: Path) -> None:
    """Only text needs the device that has the table of tokens, so media would arrive at the layers earlier."""
    path = make(TINY["llama"], tmp_path / "m.gguf")
    placement = Placement((1,) * TINY["llama"].n_layer, 1)
    runner = open_model(path, placement=placement, n_devices=2, n_cells=512, max_batch=32, embeddings=True)
    ids = np.array(tokens(40), np.int32)

    def last_row(rows: Array | None) -> bytes:
        handle = runner.memory.allocate(64)
        assert handle is not None
        futures = []
        for first, n in ((0, 10), (10, 20), (30, 10)):
            more = {"embeddings": rows} if rows is not None and first == 10 else {}
            outputs = np.array([n - 1], np.int32)
            futures.append(runner.start(ids[first : first + n], [Span(handle, first, n)], outputs, **more))
            handle.used += n
        return b"".join(future.result(60).tobytes() for future in futures)

    expected, rows = last_row(None), table_of(runner)(ids[10:30])
    assert last_row(rows) == expected
    submit = runner.devices[0].submit

    def late(graph: Graph) -> None:
        time.sleep(0.05)
        submit(graph)

    runner.devices[0].submit = late  # type: ignore[method-assign]
    assert last_row(rows) == expected
