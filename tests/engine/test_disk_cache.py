"""The disk cache: sequences survive the engine, other servers find them, and damaged files are never used."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiers import chosen, first_of
from waiting import until

from llamado.engine.cache import blocks, disk_cache
from llamado.engine.cache.blocks import BadBlock, read_data, read_head, regroup, write_block
from llamado.engine.cache.disk_cache import DiskCache, DiskCacheUnusable, StoredChain, check_folder
from llamado.engine.cache.prompt_cache import CellReader, ReadRate, StoredSequence
from llamado.engine.cache.snapshots import NEAR
from llamado.engine.engine import Engine
from llamado.engine.request import Result

from .fake import ALL, FakeForward, FakeTokenizer, ask, new_engine, send
from .test_memory_kinds import KINDS, Layers, Plain, new, req, talk, tokens
from .test_recovery import FragileForward
from .test_snapshots import CONTROL, Chat, shared

Start = Callable[..., tuple[Engine, DiskCache]]
BLOCK = 256


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make reading always pay, so that tests do not depend on the clock."""
    monkeypatch.setattr(CellReader, "pays", lambda self, handle, pace: True)
    monkeypatch.setattr(ReadRate, "pays", lambda self, n_bytes, n, pace: True)
    monkeypatch.setattr(disk_cache, "_LOOK_SECONDS", 0.01)


@pytest.fixture(scope="module", params=chosen(["all", *KINDS], ("all", "windows", "hybrid")))
def layers(request: pytest.FixtureRequest) -> Layers:
    return {"all": (ALL,), **KINDS}[request.param]


@pytest.fixture(scope="module")
def plain(layers: Layers) -> Iterator[Plain]:
    found = Plain(layers)
    yield found
    found.close()


@pytest.fixture
def start(layers: Layers, tmp_path: Path) -> Iterator[Start]:
    engines: list[Engine] = []

    def build(forward: FakeForward | None = None, limit: int = 1 << 30, **options: Any) -> tuple[Engine, DiskCache]:
        forward = forward or new(layers, n_cells=8192)
        tokenizer = FakeTokenizer(eog=())
        tokenizer.control = CONTROL
        given = {"n_slots": 1, "cache_ram": -1, "n_ctx": 4096, **options}
        folder = str(tmp_path / "cache")
        engines.append(new_engine(forward, tokenizer, cache_disk=folder, cache_disk_size=limit, **given))
        disk = engines[-1].disk
        assert disk is not None
        until(lambda: disk._looked is not None)
        return engines[-1], disk

    yield build
    for engine in engines:
        engine.close()


def files(path: Path) -> list[Path]:
    return sorted((path / "cache").iterdir())


def n_blocks(disk: DiskCache) -> int:
    return sum(map(len, disk._children.values()))


@pytest.mark.slow
def test_chats_continue_from_disk_after_a_restart(start: Start, plain: Plain, tmp_path: Path) -> None:
    """Each turn evaluates only new tokens, also the first one after each of two restarts."""
    chats = [Chat(1, thinks=True), Chat(2, thinks=False)]
    for life in range(3):
        engine, disk = start(n_slots=2)
        for turn in range(2):
            for chat in chats:
                prompt = chat.prompt()
                result = ask(engine, req(prompt, 12))
                assert result.tokens == plain(prompt, 12)
                if chat.last:
                    assert result.n_cached > shared(prompt, chat.last) - NEAR, (life, turn)
                chat.answered(prompt, result.tokens)
        assert disk.counters.hits == 2 * (life > 0)
        engine.close()
        assert all(path.stat().st_mode & 0o777 == 0o600 for path in files(tmp_path))
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    found = [block for block in map(read_head, files(tmp_path)) if not block.is_tail]
    grown = chats[1].last[:-1]
    found = [block for block in found if grown[block.start : block.end] == block.tokens.tolist()]
    assert len(found) == -(-len(grown) // BLOCK), "blocks of a growing sequence are stored once"


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["all", "hybrid", "states"], indirect=True)
def test_sequences_evicted_from_memory_come_back_from_disk(start: Start, plain: Plain) -> None:
    """Random conversations, of which memory holds about one."""
    engine, disk = start()
    assert engine._sequence_cache.store is not None
    memory = engine._sequence_cache.memory
    engine._sequence_cache.store._limit = 250 * (memory.token_bytes + 4) + 3 * memory.tail_bytes(250)
    assert talk(engine, plain, random.Random(1), 20) > 100
    assert disk.counters.hits > 0 and disk.counters.failures == 0


@pytest.mark.parametrize("pays", [True, False])
def test_a_sequence_is_read_only_if_that_pays(start: Start, monkeypatch: pytest.MonkeyPatch, pays: bool) -> None:
    prompt = tokens(2, 700)
    engine, _ = start()
    ask(engine, req(prompt, 1))
    engine.close()
    engine, disk = start()
    monkeypatch.setattr(disk, "pays", lambda *given: pays)
    assert (ask(engine, req(prompt, 1)).n_cached > 0) == (disk.counters.hits > 0) == pays


def test_two_servers_share_a_folder(start: Start, plain: Plain) -> None:
    """A server finds blocks that another one wrote, and blocks they both have are stored once."""
    one, disk = start()
    other, others = start()
    head = tokens(1, 600)
    for i in range(2):
        ask(one, req([*head, i], 1))
    one.close()
    assert disk.counters.writes and until(lambda: n_blocks(others) == disk.counters.files)
    prompt = [*head, 5, 6]
    result = ask(other, req(prompt, 9))
    assert result.tokens == plain(prompt, 9) and result.n_cached >= 600 - NEAR
    before = others.counters
    other.close()
    assert others.counters.files <= before.files + 3 and others.counters.failures == 0


def test_a_folder_that_is_not_used_any_more_gets_the_present_sequences(start: Start, tmp_path: Path) -> None:
    engine, _ = start()
    prompt = tokens(2, 700)
    ask(engine, req(prompt, 1))
    engine.use_prompt_memory(None, tmp_path / "other", 1 << 30)
    engine.close()
    engine, _ = start()
    assert ask(engine, req(prompt, 1)).n_cached >= 700 - NEAR


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["all", "hybrid"], indirect=True)
@pytest.mark.parametrize("how", first_of(["payload", "header", "cut", "gone", "start", "late", "empty", "noise"], 4))
def test_damaged_files_are_removed_and_not_used(
    start: Start, plain: Plain, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine, _ = start()
    prompt = tokens(2, 700)
    ask(engine, req(prompt, 1))
    engine.close()
    rng = random.Random(how)
    for path in files(tmp_path)[::2] if how == "gone" else files(tmp_path):
        data = bytearray(path.read_bytes())
        head = 1152 if path.suffix == ".cells" else 0
        match how:
            case "payload":
                data[-1] ^= 1
            case "header":
                data[rng.randrange(90)] ^= 1
            case "start":
                data[20] ^= 1  # hash of the tokens before it
            case "late":  # the tail and the first cells are intact
                data[-1] ^= path.suffix == ".cells" and read_head(path).start > BLOCK
            case "cut":
                del data[-1 - head // 2 :]
            case "empty":
                data.clear()
            case "noise":
                data[:] = rng.randbytes(len(data))
            case _:
                path.unlink()
                continue
        path.write_bytes(data)
    engine, disk = start()
    result = ask(engine, req(prompt, 9))
    assert result.tokens == plain(prompt, 9)
    if how != "gone":
        assert how == "late" or result.n_cached == 0
        assert disk.counters.failures > 0 and " removed: " in caplog.text
    assert ask(engine, req(prompt, 9)).tokens == result.tokens


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["all", "hybrid"], indirect=True)
def test_cells_with_nan_are_not_used(
    start: Start, plain: Plain, layers: Layers, caplog: pytest.LogCaptureFixture
) -> None:
    """An intact file may hold values that a model cannot have computed."""
    engine, _ = start()
    prompt = tokens(2, 700)
    ask(engine, req(prompt, 1))
    engine.close()
    forward = new(layers, n_cells=8192)
    forward.memory.is_valid = forward.memory.is_valid_tail = lambda data, n: False  # type: ignore[method-assign]
    engine, disk = start(forward)
    result = ask(engine, req(prompt, 9))
    assert result.tokens == plain(prompt, 9) and result.n_cached == 0
    assert disk.counters.failures > 0 and "NaN or infinity" in caplog.text


@pytest.mark.skipif(os.name != "posix", reason="modes are Unix's")
@pytest.mark.parametrize("mode", [0o700, 0o740, 0o701])
def test_folder_readable_by_other_users_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(mode)
    check_folder(tmp_path / "cache")
    assert ("chmod 700" in caplog.text) == (mode != 0o700)


@pytest.mark.parametrize("layers", ["all", "hybrid"], indirect=True)
@pytest.mark.parametrize("what", ["model", "numerics", "memory", "adapters"])
def test_files_of_another_model_or_setting_never_match(start: Start, layers: Layers, what: str) -> None:
    engine, _ = start()
    prompt = tokens(3, 300)
    ask(engine, req(prompt, 1))
    engine.close()
    forward = new((ALL, ALL) if what == "memory" else layers, n_cells=8192)
    forward.model = b"n" * 32 if what == "model" else forward.model
    forward.numerics = "others" if what == "numerics" else forward.numerics
    engine, disk = start(forward, lora=(0.5,) if what == "adapters" else ())
    assert ask(engine, req(prompt, 5)).n_cached == 0 and disk.counters.failures == disk.counters.hits == 0


def test_devices_without_numerics_do_not_use_the_cache(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Their sequences are not written, and they do not use files that other devices wrote."""
    prompt = tokens(3, 300)
    for numerics in (None, "made up", None):
        forward = new((ALL,), n_cells=8192)
        forward.numerics = numerics
        engine, disk = start(forward)
        assert ask(engine, req(prompt, 5)).n_cached == 0
        engine.close()
        assert disk.counters.failures == 0 and bool(disk.counters.writes) == bool(numerics)
    assert caplog.text.count("does not report its numerics") == 2


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["all", "hybrid"], indirect=True)
@pytest.mark.parametrize(
    ("before", "after"), [("made up", "made up"), ("made up", "others"), ("made up", None), (None, None)]
)
def test_replacing_a_device_invalidates_its_cells(
    start: Start, layers: Layers, plain: Plain, before: str | None, after: str | None
) -> None:
    """Cells that a device computed, in memory and on disk, are not reused by a device whose bits may differ.

    Two devices that do not report their numerics may differ.
    """
    forward = new(layers, FragileForward, seed=1, n_cells=8192)
    assert isinstance(forward, FragileForward)
    forward.numerics = before
    engine, _ = start(forward)
    prompts = [tokens(seed, 300) for seed in (3, 4, 5)]
    for prompt in prompts[:2]:  # the first one moves to the prompt cache
        ask(engine, req(prompt, 1))

    def replaced() -> None:
        forward.numerics = after

    forward.in_restore = replaced
    forward.die()
    again = ask(engine, req(prompts[0], 5))
    assert again.tokens == plain(prompts[0], 5) and (again.n_cached > 200) == (after == "made up")
    ask(engine, req(prompts[2], 1))
    engine.close()
    forward.end()
    for numerics in ("made up", "others"):
        forward = new(layers, n_cells=8192)
        forward.numerics = numerics
        engine, _ = start(forward)
        assert (ask(engine, req(prompts[2], 5)).n_cached > 200) == (numerics == after)
        assert after == "made up" or not ask(engine, req(prompts[1], 5)).n_cached
        engine.close()


def sequence(seed: int, n: int, tails: tuple[int, ...] = ()) -> StoredSequence:
    """Return a sequence with three bytes per cell and 100 per tail."""
    numbers = np.random.default_rng(seed).integers(1, 97, n).astype(np.int32)
    cells = [(m, np.full(3 * m, seed % 97, np.uint8)) for m in [BLOCK] * (n // BLOCK) + [n % BLOCK] if m]
    return StoredSequence(numbers, (), cells, {t: np.full(100, t % 97, np.uint8) for t in tails}, 7 * n)


def cache(path: Path, limit: int = 1 << 30) -> DiskCache:
    forward = FakeForward()
    forward.memory.__class__ = type("Three", (type(forward.memory),), {"row_sizes": [3]})
    return DiskCache(path / "cache", limit, forward.cell_kind, lambda: "")


def test_least_recently_used_sequences_are_evicted(tmp_path: Path) -> None:
    disk = cache(tmp_path, 30_000)
    stored = [sequence(seed, 1000) for seed in range(8)]
    for one in stored:
        disk.put(one)
        until(lambda: not disk._waiting and not disk._pending)
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 30_000
        chain = disk.find(stored[0].tokens, (), min, False)
        assert chain is not None and chain.n == 1000
        disk.used(chain.blocks)
    found = [disk.find(one.tokens, (), min, False) for one in stored]
    assert [chain is not None and chain.n for chain in found[:1] + found[-2:]] == [1000] * 3
    assert None in found and disk.counters.failures == 0
    huge = sequence(99, 20_000)
    disk.put(huge)
    disk.finish([], 5)
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 30_000


def test_finish_writes_all_given_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = cache(tmp_path)
    put = disk.put

    def late(stored: StoredSequence) -> None:
        """Give the writing thread time to see that the cache is closing and its queue is empty."""
        disk._thread.join(0.05)
        put(stored)

    monkeypatch.setattr(disk, "put", late)
    disk.finish([sequence(1, 1000), sequence(2, 1000)], 60)
    assert len(files(tmp_path)) == 8


def written(tmp_path: Path) -> tuple[DiskCache, StoredChain]:
    """Write a sequence of 1,000 tokens; return the cache and the sequence's blocks in it."""
    disk, stored = cache(tmp_path), sequence(1, 1000)
    disk.put(stored)
    disk.finish([], 60)
    chain = disk.find(stored.tokens, (), min, False)
    assert chain is not None
    return disk, chain


def test_a_read_of_a_damaged_file_is_over_without_a_piece(tmp_path: Path) -> None:
    disk, chain = written(tmp_path)
    path = chain.blocks[0].path
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    notified: list[bool] = []
    read = disk.load(chain, 0, (), lambda: notified.append(True))
    until(lambda: read.has_pieces)
    assert read.take() is None and read.is_finished and read.failed and not path.exists()
    until(lambda: bool(notified))
    assert disk.counters.failures == 1 and disk.counters.bytes_read == 0


def test_bytes_and_files_are_counted(tmp_path: Path) -> None:
    disk, chain = written(tmp_path)
    assert len(chain.blocks) == 4
    assert all(disk.read(block) is not None for block in chain.blocks)
    sizes = [path.stat().st_size for path in files(tmp_path)]
    found = disk.counters
    assert (found.writes, found.files, found.failures) == (4, 4, 0)
    assert found.bytes_written == found.bytes == sum(sizes) and found.bytes_read == 3 * 1000


def test_only_the_rest_of_a_sequence_is_read_and_weighed(tmp_path: Path) -> None:
    disk, chain = written(tmp_path)
    weighed: list[tuple[int, int, float]] = []
    disk._rate = SimpleNamespace(pays=lambda *given: weighed.append(given))  # type: ignore[assignment]
    disk.pays(chain, 0, 50.0)
    disk.pays(chain, 600, 50.0)  # in the third block
    assert weighed == [(3 * 1000, 1000, 50.0), (3 * (1000 - 2 * BLOCK), 400, 50.0)]


def test_sequences_that_are_written_again_count_as_used(tmp_path: Path) -> None:
    cache(tmp_path).finish([sequence(1, 1000)], 60)
    for path in files(tmp_path):
        os.utime(path, ns=(0, 0))
    cache(tmp_path).finish([sequence(1, 1000)], 60)
    used = {read_head(path).start: path.stat().st_mtime_ns for path in files(tmp_path)}
    assert 0 not in used.values()
    assert sorted(used, key=lambda start: -used[start]) == sorted(used)  # the beginning is evicted last


def test_eviction_makes_room_for_further_files(tmp_path: Path) -> None:
    limit = 100_000
    disk = cache(tmp_path, limit)
    totals = [0]
    for seed in range(1000):
        disk.put(sequence(seed, 100))
        until(lambda: not disk._waiting and not disk._pending)
        totals.append(sum(path.stat().st_size for path in files(tmp_path)))
        if totals[-1] <= totals[-2]:
            break
    disk.finish([], 60)
    size, left = totals[1], limit * (1 - disk_cache._SLACK)
    assert totals[-2] > limit - 2 * size and left - size < totals[-1] - size <= left


def test_unfinished_files_are_removed_once_they_are_old(tmp_path: Path) -> None:
    """A killed process leaves them; a younger one may be another's that is being written."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    old, new, other = folder / f".old{blocks.PART}", folder / f".new{blocks.PART}", folder / f"old{blocks.PART}"
    for path in (old, new, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (0, 0))
    cache(tmp_path).finish([sequence(1, 10)], 60)
    assert not old.exists() and new.exists() and other.exists()


def test_end_of_a_sequence_is_evicted_before_its_beginning(tmp_path: Path) -> None:
    disk = cache(tmp_path, 20_000)
    long, other = sequence(1, 2000), sequence(2, 1200)
    for one in (long, other):
        disk.put(one)
    disk.finish([], 5)
    chain = disk.find(long.tokens, (), min, False)
    assert chain is not None and 500 < chain.n < 2000 and [b.start for b in chain.blocks][:2] == [0, BLOCK]


def test_tails_take_about_as_much_space_as_cells(tmp_path: Path) -> None:
    """A growing sequence keeps the tails at its end, and as many earlier ones as take up the space of its cells."""
    disk, other = cache(tmp_path), sequence(2, 500, (250, 500))
    disk.put(other)
    whole = sequence(1, 1200)
    for n in (400, 800, 1200):
        tails = {t: np.full(1000, t % 97, np.uint8) for t in range(40, n + 1, 40)}
        disk.put(StoredSequence(whole.tokens[:n], (), sequence(1, n).cells, tails, 7 * n))
        until(lambda: not disk._waiting and not disk._pending)
        found = [block for blocks in disk._children.values() for block in blocks.values() if block.is_tail]
        ends = sorted(block.end for block in found if block.tokens[0] in whole.tokens and block.n_bytes == 1000)
        assert len(ends) == 4 + 3 * n // 1000 and ends[-3:] == [n - 80, n - 40, n]
        assert all(read_data(block)[0] == block.end % 97 for block in found)
        chain = disk.find(whole.tokens[:n], (), min, True)
        assert chain is not None and chain.n == n
    found_other = disk.find(other.tokens, (), min, True)
    assert found_other is not None and found_other.n == 500  # tails of another sequence stay
    disk.finish([], 5)
    assert sum(path.suffix == ".tail" for path in files(tmp_path)) == 4 + 3 + 2


def test_a_tail_serves_only_its_own_sequence(tmp_path: Path) -> None:
    """Two sequences continue after the same block: one has cells there, the other a tail."""
    disk = cache(tmp_path)
    mine, other = sequence(1, BLOCK + 100), sequence(2, BLOCK + 60, (BLOCK + 60,))
    other.tokens[:BLOCK] = mine.tokens[:BLOCK]
    for one in (mine, other):
        disk.put(one)
    disk.finish([], 5)

    def found(one: StoredSequence, reach: Callable[[int, int], int]) -> int:
        chain = disk.find(one.tokens, (), reach, True)
        return 0 if chain is None else chain.n

    def all_or_nothing(tail: int, n: int) -> int:
        return tail if tail <= n else 0

    assert [found(one, all_or_nothing) for one in (mine, other)] == [0, BLOCK + 60]
    assert [found(one, min) for one in (mine, other)] == [BLOCK, BLOCK + 60]


def test_full_disk_is_logged_and_leaves_no_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A block that cannot be written leaves no file, and the cache continues."""
    disk = cache(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, limits[1]))
    try:
        disk.put(sequence(1, 1000))
        until(lambda: disk.counters.failures == 1)
        disk.put(sequence(1, 1000))
        until(lambda: disk.counters.failures == 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.strerror(errno.EFBIG) in caplog.text and len(caplog.records) == 1 and not files(tmp_path)
    disk._rest_until = 0.0
    disk.finish([sequence(1, 1000)], 5)
    assert len(files(tmp_path)) == 4


WRITER = """
import sys, time
from pathlib import Path
sys.path[:0] = [sys.argv[2]]
from engine.test_disk_cache import cache, sequence
disk = cache(Path(sys.argv[1]))
print("up", flush=True)
for seed in range(100_000):
    while disk._pending > 1 << 20: time.sleep(0.001)
    disk.put(sequence(seed, 600, (599,)))
"""


@pytest.mark.slow
def test_kill_while_writing_leaves_only_intact_files(tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    process = subprocess.Popen([sys.executable, "-c", WRITER, tmp_path, tests], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    until(lambda: sum(path.suffix != blocks.PART for path in files(tmp_path)) > 40)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    for path in files(tmp_path):
        if path.suffix == blocks.PART:
            os.utime(path, (0, 0))
        else:
            read_data(read_head(path))
    disk = cache(tmp_path)
    until(lambda: n_blocks(disk) > 40)
    assert disk.counters.failures == 0 and not [path for path in files(tmp_path) if path.suffix == blocks.PART]
    disk.finish([], 1)


def test_unusable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").write_bytes(b"")
    with pytest.raises(DiskCacheUnusable, match="--cache-disk"):
        cache(tmp_path)


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    disk = cache(tmp_path)
    disk.finish([sequence(1, 300)], 5)
    first = files(tmp_path)[0]
    (tmp_path / "cache" / "notes.txt").write_text("mine")
    os.mkfifo(tmp_path / "cache" / first.name.replace(first.name[-10], "x"))
    (tmp_path / "cache" / ("0" * 16 + "-" + "1" * 32 + ".cells")).symlink_to("/dev/zero")
    again = cache(tmp_path)
    until(lambda: n_blocks(again) == 2)
    again.finish([], 1)
    assert (tmp_path / "cache" / "notes.txt").read_text() == "mine"


def test_regroup_splits_pieces_into_blocks() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 256, (50, 3), np.uint8), rng.integers(0, 256, (50, 2), np.uint8)

    def cells(first: int, n: int) -> np.ndarray[Any, Any]:
        return np.concatenate([a[first : first + n].reshape(-1), b[first : first + n].reshape(-1)])

    pieces = [(n, cells(at, n)) for at, n in ((0, 7), (7, 1), (8, 30), (38, 12))]
    found = list(regroup(pieces, [3, 2], 16))
    assert [n for n, _ in found] == [16, 16, 16, 2]
    assert all(np.array_equal(data, cells(16 * i, n)) for i, (n, data) in enumerate(found))
    assert [n for n, data in regroup(pieces, [], 20) if not data.size] == [20, 20, 10]


def test_file_under_another_name_is_refused(tmp_path: Path) -> None:
    text = np.arange(9, dtype=np.int32)
    name = blocks.name_of(b"p" * 16, text, False)
    block = write_block(blocks.path_of(tmp_path, "f", name, False), b"p" * 16, 3, text, False, np.arange(5, dtype="u1"))
    assert read_data(read_head(block.path)).tolist() == [0, 1, 2, 3, 4] and read_head(block.path).end == 12
    other = tmp_path / f"f-{'0' * 32}.cells"
    os.replace(block.path, other)
    with pytest.raises(BadBlock, match="another's name"):
        read_head(other)


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["all", "hybrid"], indirect=True)
def test_requests_run_while_a_sequence_is_read_from_disk(
    start: Start, layers: Layers, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile other requests run, share the prefix and are cancelled, and a device fails."""
    engine, _ = start(n_slots=2)
    prompt = tokens(4, 2000)
    ask(engine, req(prompt, 1))
    engine.close()

    def slow(block: blocks.Block) -> Any:
        time.sleep(0.05)
        return read_data(block)

    monkeypatch.setattr(disk_cache, "read_data", slow)
    forward = new(layers, FragileForward, seed=1, n_cells=8192)
    assert isinstance(forward, FragileForward)
    engine, disk = start(forward, n_slots=2)
    cancelled = send(engine, req(prompt, 5))
    time.sleep(0.1)
    engine.cancel(cancelled.id)
    results: list[Result] = []
    clients = [send(engine, req(prompt, 5)), send(engine, req([*prompt[:900], 7], 5))]
    time.sleep(0.1)
    short = tokens(5, 30)
    clients.append(send(engine, req(short, 5)))
    time.sleep(0.1)
    forward.die()
    for client, asked in zip(clients, (prompt, [*prompt[:900], 7], short), strict=True):
        results.append(client.result)
        assert client.result.tokens == plain(asked, 5)
    assert disk.counters.failures == 0
    again = ask(engine, req(prompt, 5))
    assert again.tokens == plain(prompt, 5) and again.n_cached > 1900
    forward.end()
