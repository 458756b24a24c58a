"""Slot files: a restored slot equals the saved one, and invalid files do no harm."""

from __future__ import annotations

import itertools
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiers import chosen, first_of
from tiny_models import make_llama
from waiting import GUARD, until

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.jit import Jit
from llamado.devices.device import DeviceLost
from llamado.devices.split.placement import SplitOptions
from llamado.engine.cache.slot_file import SlotReader
from llamado.engine.engine import Engine
from llamado.engine.errors import (
    EngineClosed,
    InvalidRequest,
    NoRoom,
    QueueFull,
    SlotFileError,
    SlotNotSaved,
    Unavailable,
)
from llamado.engine.forward import contract
from llamado.engine.forward.options import RunnerOptions
from llamado.engine.forward.runner import ModelRunner
from llamado.engine.options import EngineOptions
from llamado.engine.scheduler import outage, slot_io
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType
from llamado.models import load_model
from llamado.models.memory import KV_TYPES, RowSpan

from .fake import FakeForward, FakeTokenizer, ask, new_engine, req, send
from .test_restore import TWO, Cluster

Make = Callable[..., tuple[Engine, FakeForward]]


@pytest.fixture
def make(exits: ExitStack) -> Make:
    def build(n_cells: int = 4096, **kw: Any) -> tuple[Engine, FakeForward]:
        forward = FakeForward(n_cells)
        engine = exits.enter_context(closing(new_engine(forward, FakeTokenizer(), **{"n_slots": 2, **kw})))
        return engine, forward

    return build


PROMPT = [1 + i * 7 % 96 for i in range(300)]


def save_slot_0(engine: Engine, path: Path, n: int = 300) -> list[int]:
    """Save slot 0 with a sequence; return the sequence."""
    answer = ask(engine, req(PROMPT[:n], id_slot=0)).tokens
    assert engine.save_slot(0, path).result(60).n_tokens == n + 7
    return PROMPT[:n] + answer[:-1]


def test_slot_is_restored_in_another_engine(make: Make, tmp_path: Path) -> None:
    engine, _ = make()
    path = tmp_path / "a"
    sequence = save_slot_0(engine, path)
    expected = ask(engine, req([*sequence, 5], 20)).tokens

    other, forward = make()
    done = other.restore_slot(1, path).result(60)
    assert done.n_tokens == 307 and done.n_bytes == path.stat().st_size and done.seconds > 0
    assert not forward.sizes and until(lambda: other.snapshot().kv_cells_used == 307)
    result = ask(other, req([*sequence, 5], 20))
    assert (result.tokens, result.n_cached, result.id_slot) == (expected, 307, 1)
    assert sum(forward.sizes) == 1 + 19, "only new tokens are evaluated"
    assert [p.name for p in tmp_path.iterdir()] == ["a"], "no other file is left in the folder"


def test_prefix_of_a_restored_slot_is_shared(make: Make, tmp_path: Path) -> None:
    """Other slots copy its prefix even before its first request."""
    engine, _ = make()
    sequence = save_slot_0(engine, tmp_path / "a")
    other, forward = make()
    other.restore_slot(0, tmp_path / "a").result(60)
    result = ask(other, req([*sequence, 5], id_slot=1))
    assert result.n_cached == 307 and len(forward.copies) == 1


def test_empty_slot_is_saved_and_restored(make: Make, tmp_path: Path) -> None:
    engine, _ = make()
    assert engine.save_slot(0, tmp_path / "empty").result(60).n_tokens == 0
    save_slot_0(engine, tmp_path / "a")
    assert engine.restore_slot(0, tmp_path / "empty").result(60).n_tokens == 0
    assert engine.erase_slot(0).result(60) == 0
    assert ask(engine, req(PROMPT)).n_cached == 0


def test_erase_frees_the_cells(make: Make, tmp_path: Path) -> None:
    engine, _ = make()
    save_slot_0(engine, tmp_path / "a")
    assert engine.erase_slot(0).result(60) == 307
    assert engine.erase_slot(0).result(60) == 0
    until(lambda: engine.snapshot().kv_cells_used == 0)
    assert ask(engine, req(PROMPT)).n_cached == 0


def test_invalid_slot_requests_are_refused(make: Make, tmp_path: Path) -> None:
    engine, _ = make(max_queue=1)
    for bad in (-1, 2, 99):
        with pytest.raises(InvalidRequest, match="Invalid slot ID"):
            engine.save_slot(bad, tmp_path / "a")
    with pytest.raises(SlotNotSaved, match="a: No such file"):
        engine.save_slot(0, tmp_path / "nowhere" / "a").result(60)
    (tmp_path / "folder").mkdir()
    with pytest.raises(SlotNotSaved, match="folder"):
        engine.save_slot(0, tmp_path / "folder").result(60)
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]
    engine.close()
    with pytest.raises(EngineClosed):
        engine.erase_slot(0)


def test_save_waits_for_a_busy_slot(make: Make, tmp_path: Path) -> None:
    """A save or erase gets the slot before later requests; requests do not wait for the file."""
    engine, forward = make(n_slots=1, max_queue=4)
    gate = threading.Event()
    forward.before = lambda n: gate.wait(GUARD) and None
    first = send(engine, req(PROMPT, 5))
    while not engine.snapshot().requests_processing:
        time.sleep(0.001)
    save = engine.save_slot(0, tmp_path / "a")
    given_up = engine.save_slot(0, tmp_path / "b")
    erase = engine.erase_slot(0)
    second = send(engine, req(PROMPT, 5))
    assert given_up.cancel()
    with pytest.raises(QueueFull):
        for _ in range(5):
            engine.erase_slot(0)
    gate.set()
    assert save.result(60).n_tokens == len(PROMPT) + 4
    assert erase.result(60) == len(PROMPT) + 4
    assert second.result.n_cached == 0 and second.result.tokens == first.result.tokens
    assert not (tmp_path / "b").exists()


def test_slow_file_does_not_block_other_slots(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow file blocks only its slot: other slots answer, and the slot stays reserved."""
    engine, _ = make(cache_ram=1)
    sequence = save_slot_0(engine, tmp_path / "a")
    gate, inside = threading.Event(), threading.Event()
    write = slot_io.write_slot

    def slow(*args: Any) -> int:
        inside.set()
        assert gate.wait(GUARD)
        return write(*args)

    monkeypatch.setattr(slot_io, "write_slot", slow)
    save = engine.save_slot(0, tmp_path / "b")
    assert inside.wait(60)
    clients = [send(engine, req(PROMPT[i:], 5)) for i in range(5)]
    pinned = send(engine, req([*sequence, 9], 5, id_slot=0))
    assert all(client.result.id_slot == 1 for client in clients)
    assert not pinned.over.is_set() and engine.snapshot().idle_since is None
    gate.set()
    assert pinned.result.n_cached == 307 and save.result(60).n_tokens == 307
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()


def test_close_ends_a_running_save(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, forward = make()
    save_slot_0(engine, tmp_path / "a")
    before = (tmp_path / "a").read_bytes()
    gate, inside = threading.Event(), threading.Event()
    read = forward.read_rows

    def slow(spans: Any) -> Any:
        inside.set()
        gate.wait(GUARD)
        return read(spans)

    forward.read_rows = slow  # type: ignore[method-assign]
    save = engine.save_slot(0, tmp_path / "a")
    assert inside.wait(60)
    late = engine.restore_slot(0, tmp_path / "a")
    closing = threading.Thread(target=engine.close)
    closing.start()
    while not engine._queue.closing:
        time.sleep(0.001)
    gate.set()
    closing.join(GUARD)
    for future in (save, late):
        with pytest.raises(EngineClosed):
            future.result(60)
    assert [p.name for p in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_bytes() == before


def test_restore_takes_cells_of_idle_slots_only(make: Make, tmp_path: Path) -> None:
    """Idle slots give up their cells; running answers keep theirs."""
    engine, forward = make(1024, n_slots=3, cache_ram=1)
    sequence = save_slot_0(engine, tmp_path / "a")
    for slot, n in ((1, 290), (2, 200)):
        ask(engine, req(PROMPT[::-1][:n], 0, id_slot=slot))
    assert ask(engine, req(PROMPT[5:], 0, id_slot=2)).n_cached == 0
    engine.restore_slot(1, tmp_path / "a").result(60)
    assert ask(engine, req([*sequence, 3], 4, id_slot=1)).n_cached == 307
    engine.erase_slot(1).result(60)

    gate, inside = threading.Event(), threading.Event()

    def wait(n: int) -> None:
        inside.set()
        gate.wait(GUARD)

    forward.before = wait
    busy = [send(engine, req(PROMPT[i:] * 2 + PROMPT[:120], 90, id_slot=i)) for i in (0, 2)]
    assert inside.wait(60)
    while engine.snapshot().requests_processing < 2:
        time.sleep(0.001)
    restore = engine.restore_slot(1, tmp_path / "a")
    gate.set()
    with pytest.raises(NoRoom, match="no room for 307 tokens"):
        restore.result(60)
    for client in busy:
        assert client.result.n_predicted == 90


# -- bad files -------------------------------------------------------------------------------------------------------


def resealed(data: bytes, n_tokens: int, piece: int = 256, cell: int = 8) -> bytes:
    """Return a file with checksums that match its changed content."""
    out, crc, at = b"", 0, 0
    sizes = [72, 4 * n_tokens, *(cell * min(piece, n_tokens - i) for i in range(0, n_tokens, piece))]
    for size in sizes:
        part = data[at : at + size]
        crc = zlib.crc32(part, crc)
        out += part + struct.pack("<I", crc)
        at += size + 4
    return out


def put(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


BAD: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda d: b"", "not a saved slot"),
    "text": (lambda d: b"garbage\n" * 100, "not a saved slot"),
    "cut": (lambda d: d[:-1], "wrong length"),
    "cut header": (lambda d: d[:40], "not a saved slot"),
    "longer": (lambda d: d + b"x", "wrong length"),
    "spoilt header": (lambda d: put(d, 70, b"\x99"), "damaged"),
    "spoilt token": (lambda d: put(d, 80, b"\x01"), "damaged"),
    "spoilt cell": (lambda d: put(d, len(d) - 20, b"\x99"), "damaged"),
    "pieces swapped": (lambda d: d[: 80 + 1228] + d[1308 + 2052 :] + d[1308 : 1308 + 2052], "damaged"),
    "other version": (lambda d: resealed(put(d, 8, b"\x05"), 307), "version 5"),
    "scales of no adapters": (lambda d: resealed(put(d, 8, b"\x02"), 307), "1 LoRA adapters; there are 0"),
    "other model": (lambda d: resealed(put(d, 50, b"\x02"), 307), "another model"),
    "other types": (lambda d: resealed(put(d, 16, b"\x08"), 307), "other types"),
    "other layers": (lambda d: resealed(put(d, 24, b"\x08"), 307), "header is wrong"),
    "no piece": (lambda d: resealed(put(d, 28, struct.pack("<I", 0)), 307), "header is wrong"),
    "huge piece": (lambda d: resealed(put(d, 28, struct.pack("<I", 1 << 31)), 307), "header is wrong"),
    "huge cell": (lambda d: resealed(put(d, 32, struct.pack("<Q", 1 << 62)), 307), "header is wrong"),
    "huge": (lambda d: resealed(put(d, 12, struct.pack("<I", 0xFFFF_FFFF)), 307), "do not fit"),
    "fewer": (lambda d: resealed(put(d, 12, struct.pack("<I", 5)), 307), "wrong length"),
    "no such token": (
        lambda d: resealed(put(d, 76, struct.pack("<i", 97)), 307),
        "tokens that the model does not have",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_files_are_refused(make: Make, tmp_path: Path, name: str) -> None:
    spoil, message = BAD[name]
    engine, _ = make()
    path = tmp_path / "a"
    sequence = save_slot_0(engine, path)
    whole = path.read_bytes()
    assert resealed(whole, 307) == whole
    path.write_bytes(spoil(whole))
    with pytest.raises(SlotFileError, match=f"^a: .*{message}"):
        engine.restore_slot(0, path).result(60)
    assert ask(engine, req([*sequence, 5], id_slot=0)).n_cached == 307, "the slot is unchanged"


def test_links_and_pipes_are_refused(make: Make, tmp_path: Path) -> None:
    """Links are not followed, and pipes are not waited for."""
    engine, _ = make()
    sequence = save_slot_0(engine, tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, message in {
        "nothing": "No such file",
        "link": "symbolic links",
        "folder": "not a regular file|directory",
        "pipe": "not a regular file",
    }.items():
        with pytest.raises(SlotFileError, match=message):
            engine.restore_slot(0, tmp_path / name).result(60)
    secret = tmp_path.parent / "secret"
    secret.write_text("mine")
    (tmp_path / "out").symlink_to(secret)
    engine.save_slot(0, tmp_path / "out").result(60)
    assert secret.read_text() == "mine" and not (tmp_path / "out").is_symlink()
    assert ask(engine, req([*sequence, 5], id_slot=0)).n_cached == 307


def test_sequence_longer_than_the_slot_is_refused(make: Make, tmp_path: Path) -> None:
    engine, _ = make()
    save_slot_0(engine, tmp_path / "a")
    small, _ = make(n_ctx=306)
    with pytest.raises(SlotFileError, match="its 307 tokens do not fit the slot's context of 306"):
        small.restore_slot(0, tmp_path / "a").result(60)


@pytest.mark.slow
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_bytes_are_detected(tmp_path: Path, data: st.DataObject) -> None:
    forward = FakeForward()
    path = tmp_path / "a"
    if not (tmp_path / "whole").exists():
        engine = Engine(forward, FakeTokenizer())
        save_slot_0(engine, tmp_path / "whole", 20)
        engine.close()
    whole = (tmp_path / "whole").read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    spoilt = put(whole, at, data.draw(st.binary(min_size=1, max_size=8)))[: data.draw(st.integers(0, len(whole)))]
    path.write_bytes(spoilt)
    if spoilt == whole:
        return
    with pytest.raises(SlotFileError):
        SlotReader(path, forward.cell_kind, n_ctx=4096, n_vocab=97)


# -- real forward passes ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return make_llama(path, n_embd=256, n_ff=512, n_layer=4, n_vocab=300, wtype="Q4_K")


TOKENIZER = FakeTokenizer(dict.fromkeys(range(300), b"x"))
LONG = np.random.default_rng(0).integers(1, 300, 300).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("type", first_of(["q8_0", "f16", "f32", "bf16", "iq4_nl", "q5_1"]))
def test_real_models_restore_bit_for_bit(model: Path, jit: Jit, tmp_path: Path, type: str) -> None:
    """A sequence saved by one engine and restored by another continues with the same bits."""
    kind = TensorType[type.upper()]
    answers = []
    with GGUFFile.open(model) as file:
        for slot in (0, 1):
            forward = ModelRunner(
                file,
                load_model(file),
                [CpuDevice(1, jit=jit)],
                RunnerOptions(n_cells=1024, max_batch=64, type_k=kind, type_v=kind),
            )
            engine = Engine(forward, TOKENIZER, EngineOptions(n_slots=2))
            if slot == 0:
                whole = ask(engine, req(LONG, 12, id_slot=0, n_probs=300)).probs
                ask(engine, req(LONG, 6, id_slot=0, cache_prompt=False))
                engine.save_slot(0, tmp_path / "a").result(60)
            else:
                engine.restore_slot(slot, tmp_path / "a").result(60)
            head = [*LONG, *(item.token.id for item in whole[:6])]
            result = ask(engine, req(head, 6, n_probs=300))
            assert result.n_cached == 305 and result.id_slot == slot
            answers.append(result.probs)
            engine.close()
            forward.close()
    assert answers[0] == answers[1] == whole[6:]


def test_cells_with_nan_or_infinity_are_refused(model: Path, jit: Jit) -> None:
    """Infinite and huge values in cells would reach other sequences through masks that multiply by zero."""
    with GGUFFile.open(model) as file:
        for type in KV_TYPES:
            forward = ModelRunner(
                file, load_model(file), [CpuDevice(1, jit=jit)], RunnerOptions(n_cells=256, type_k=type, type_v=type)
            )
            cells = forward.rows.read_rows([RowSpan(tensor, 0, 3) for tensor in forward.memory.tensors])
            n_scales = {TensorType.Q4_1: 2, TensorType.Q5_1: 2}.get(type, 1)
            if type.block_size > 1:
                cells.reshape(-1, type.block_bytes)[:, 2 * n_scales :] = 0xFF  # integers are always valid
            assert forward.memory.is_valid(cells, 3), type
            none = {
                TensorType.F16: [0, 0, 0, 0xFC],
                TensorType.F32: [0, 0, 0xC0, 0x7F],
                TensorType.BF16: [0, 0, 0x60, 0x72],
            }.get(type, [*[0] * (2 * n_scales - 1), 0x7C])  # the last scale of a block
            size = max(type.block_bytes, 4)
            for at in (0, cells.size // 2 // size * size, cells.size - size):
                spoilt = cells.copy()
                spoilt[at : at + len(none)] = none
                assert not forward.memory.is_valid(spoilt, 3), type
            assert not forward.memory.is_valid(cells[:-1], 3)
            forward.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    chosen(
        itertools.product(["save", "restore"], [0, 9], [False, True]),
        [("save", 0, False), ("save", 9, True), ("restore", 9, False), ("restore", 0, True)],
        id=lambda case: "-".join(map(str, case)),
    ),
)
def test_losing_a_worker_during_save_or_restore(
    model: Path, jit: Jit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[str, int, bool]
) -> None:
    """The file is complete, or the slot is restored, once the device is back or its layers have moved."""
    what, nth, elsewhere = case
    monkeypatch.setattr(outage, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(contract, "_PIECE_CELLS", 64)
    cluster = Cluster(model, TWO, jit, n_cells=1024, max_batch=64)
    engine = Engine(
        cluster.forward, TOKENIZER, EngineOptions(n_slots=2, split=SplitOptions(failover=0.0 if elsewhere else None))
    )
    try:
        first = ask(engine, req(LONG, 6, id_slot=0)).tokens
        expected = ask(engine, req([*LONG, *first], 6, id_slot=1, cache_prompt=False)).tokens
        engine.save_slot(0, tmp_path / "before").result(60)
        if elsewhere:
            cluster.away = {"RPC2"}
        device = cluster.device(2)
        count = 0

        def die(now: str) -> None:
            nonlocal count
            if now == ("read" if what == "save" else "write"):
                count += 1
                if count == nth + 1:
                    device.die()

        done: Future[Any]
        if what == "save":
            device.before = die
            done = engine.save_slot(0, tmp_path / "a")
            assert done.result(60).n_tokens == 305
            assert (tmp_path / "a").read_bytes() == (tmp_path / "before").read_bytes()
        else:
            engine.erase_slot(0).result(60)
            engine.erase_slot(1).result(60)
            device.before = die
            assert engine.restore_slot(0, tmp_path / "before").result(60).n_tokens == 305
        assert device.lost is not None
        result = ask(engine, req([*LONG, *first], 6))
        assert (result.tokens, result.n_cached, result.id_slot) == (expected, 305, 0)
    finally:
        engine.close()
        cluster.forward.close()
        cluster.file.close()


@pytest.mark.slow
def test_save_fails_if_a_worker_stays_away(model: Path, jit: Jit, tmp_path: Path) -> None:
    """The request fails after its waiting time; the earlier file stays unchanged."""
    cluster = Cluster(model, TWO, jit, n_cells=1024, max_batch=64)
    engine = Engine(cluster.forward, TOKENIZER, EngineOptions(n_slots=2, split=SplitOptions(request_wait=0.1)))
    try:
        ask(engine, req(LONG, 6, id_slot=0))
        engine.save_slot(0, tmp_path / "a").result(60)
        before = (tmp_path / "a").read_bytes()
        cluster.away = {"RPC2"}
        cluster.device(2).before = lambda now: cluster.device(2).die() if now == "read" else None
        with pytest.raises((DeviceLost, Unavailable)):
            engine.save_slot(0, tmp_path / "a").result(60)
        with pytest.raises(Unavailable):
            engine.save_slot(0, tmp_path / "a").result(60)
        with pytest.raises(Unavailable):
            engine.restore_slot(1, tmp_path / "a").result(60)
        assert (tmp_path / "a").read_bytes() == before
        cluster.away.clear()

        def n_restored() -> int:
            with suppress(Unavailable):  # the worker may be found later than a request waits
                return engine.restore_slot(1, tmp_path / "a").result(60).n_tokens
            return 0

        assert until(n_restored) == 305
    finally:
        engine.close()
        cluster.forward.close()
        cluster.file.close()
