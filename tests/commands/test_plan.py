"""Output of `llamado plan` and `--list-devices`, for given device figures and real workers."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ports import free_port
from stand_in_cards import Cards, install
from tiny_models import make_gemma3, make_llama
from waiting import until

from llamado.commands import cli
from llamado.commands import plan as planning
from llamado.commands.plan import AUTO, MEMORY, Candidate, candidates, comparison, layers_text
from llamado.devices.registry import Unreachable, backend
from llamado.devices.split.placement import DeviceFigures, ModelSizes, NotEnoughMemory, Placement, SplitOptions, predict
from llamado.rpc.client.workers import WorkersUnreachable

MIB = 1 << 20


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("plan") / "tiny.gguf", n_layer=6)


def figures(*frees: int) -> list[DeviceFigures]:
    here = DeviceFigures(name="CPU", local=True, free=frees[0], total=frees[0], decode=1e9, prefill=1e7)
    return [
        here,
        *(
            DeviceFigures(
                name=f"RPC{i}[far:{i}]", local=False, free=free, total=free, decode=1e10, prefill=1e7,
                round_trip=1e-6, bandwidth=1e9,
            )
            for i, free in enumerate(frees[1:])
        ),
    ]  # fmt: skip


def given(monkeypatch: pytest.MonkeyPatch, *frees: int) -> None:
    monkeypatch.setattr(planning, "_figures", lambda *_: figures(*frees))


def rows(text: str, name: str) -> list[list[str]]:
    """Return the cells of all table rows whose first cell is `name`."""
    lines = [re.split("[│┃]", line)[1:-1] for line in text.splitlines() if re.match(rf"[│┃] {re.escape(name)} ", line)]
    return [[cell.strip() for cell in line] for line in lines]


def test_gain_of_the_worker_ring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model_path: Path
) -> None:
    """Three workers with 10 ms per direction: a token needs 4 transfers with a ring, 6 without."""
    slow = [replace(device, round_trip=0.02, bandwidth=1e12) for device in figures(*[3000 * MIB] * 4)[1:]]
    for links, ways in ((True, 4), (False, 6)):
        shown = [figures(3000 * MIB)[0], *(replace(device, links=links) for device in slow)]
        monkeypatch.setattr(planning, "_figures", lambda *_, shown=shown: shown)
        assert cli.main(["plan", "-m", str(model_path), "--rpc", "far:1,far:2,far:3", "-ts", "1,1,1", "-c", "256"]) == 0
        text = capsys.readouterr().out
        assert float(rows(text, "total")[0][7]) == pytest.approx(10 * ways, abs=0.1)
        gain = re.search(r"worker ring: ([\d.]+) ms per token; .*: ([\d.]+) ms", text)
        assert bool(gain) == links
        if gain:
            assert float(gain[2]) - float(gain[1]) == pytest.approx(20, abs=0.1)


def test_placements_by_all_rules(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model_path: Path
) -> None:
    given(monkeypatch, 800 * MIB, 3000 * MIB, 1000 * MIB)
    command = ["plan", "-m", str(model_path), "--rpc", "far:1,far:2", "-ts", "1,1", "-c", "256"]
    assert cli.main(command) == 0
    text = capsys.readouterr().out
    assert "tiny.gguf: 6 layers and the head" in text and "256 tokens of context" in text
    order = [text.index(title) for title in ("Devices", "--tensor-split 1/1", "auto: least", "memory: by free")]
    assert order == sorted(order)
    device, ratio, auto, memory = rows(text, "RPC0[far:0]")
    assert device[1:3] == ["3,000 MiB", "3,000 MiB"] and device[3] == "10.0"
    assert (ratio[1], memory[1]) == ("0-3", "0-5")
    assert auto[1] == "0-5, head"  # ten times as fast as this machine, with a fast link
    assert [row[1] for row in rows(text, "RPC1[far:1]")[1:]] == ["4-5, head", "–", "head"]
    assert "times as fast as by memory" in text
    totals = rows(text, "total")
    assert len(totals) == 3 and all(float(row[6]) > 0 for row in totals)


def test_one_machine_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model_path: Path
) -> None:
    given(monkeypatch, 800 * MIB)
    assert cli.main(["plan", "-m", str(model_path)]) == 0
    text = capsys.readouterr().out
    assert rows(text, "CPU")[1][1] == "0-5, head" and "by memory" not in text


def test_placement_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model_path: Path
) -> None:
    given(monkeypatch, 800 * MIB, 1024, 1000 * MIB)
    command = ["plan", "-m", str(model_path), "--rpc", "far:1,far:2", "-c", "256"]
    assert cli.main([*command, "-ts", "1,1"]) == 1
    out, err = capsys.readouterr()
    assert "--tensor-split: RPC0[far:0] 1, RPC1[far:1] 1\n" in out
    assert "--tensor-split 1/1 — does not fit" in out and "missing" in rows(out, "RPC0[far:0]")[1][5]
    assert "RPC0[far:0] needs" in err and "RPC1" not in err
    assert cli.main(command) == 0  # by placing the layers elsewhere
    out = capsys.readouterr().out
    assert rows(out, "RPC0[far:0]")[1][1] == "–" and "RPC0[far:0]: no layers: a layer takes" in out
    given(monkeypatch, 1024, 1024, 1024)
    assert cli.main(command) == 1
    out, err = capsys.readouterr()
    assert "auto: least time per token — does not fit" in out and "not enough memory: CPU needs" in err
    given(monkeypatch, 1024)
    assert cli.main(["plan", "-m", str(model_path)]) == 1


def test_memory_of_a_draft_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, model_path: Path
) -> None:
    """The plan shows its size, and reserves memory of this machine for it."""
    small = make_llama(tmp_path / "small.gguf", n_layer=2)
    command = ["plan", "-m", str(model_path), "-c", "512", "-md", str(small)]
    free, given_up = [], []
    for options in ([], ["--spec-type", "suffix"], ["-md", str(small), "--no-mmap"]):
        given(monkeypatch, 800 * MIB)
        assert cli.main([*command[: 5 if options else 7], *options]) == 0
        text = capsys.readouterr().out
        free.append(float(rows(text, "CPU")[0][1].split()[0]))
        told = re.search(
            r"draft model small.gguf \(draft-simple\): ([\d.]+) MiB of weights, ([\d.]+) MiB of K/V cache", text
        )
        assert bool(told) == (options != ["--spec-type", "suffix"])
        if told:
            assert float(told[1]) == pytest.approx(small.stat().st_size / MIB, abs=0.3)
            whole = rows(text, "total")[0][3]
            assert float(told[2]) == pytest.approx(float(whole.split()[0]) / 3, abs=0.1)
            left = re.search(r"reserves ([\d.]+) MiB of its free", text)
            assert left is not None and free[-1] == pytest.approx(800 - float(left[1]), abs=1)
            given_up.append(float(left[1]))
    assert free[1] == 800 > free[0] and given_up[1] > given_up[0], "unmapped weights count as well"

    on_workers = [*command, "--rpc", "far:1", "--spec-draft-device", "RPC0", "-ts", "1"]
    given(monkeypatch, 800 * MIB, 800 * MIB)
    assert cli.main(on_workers) == 0
    text = capsys.readouterr().out
    assert "on the workers of --spec-draft-device" in text and rows(text, "CPU")[0][1] == "800 MiB"


def test_context_slots_and_cache_types_count(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = make_gemma3(tmp_path / "g.gguf", n_layer=4, n_ctx=4096)
    given(monkeypatch, 800 * MIB)
    found = []
    for options in ("", "-c 1024", "-c 1024 -ctk f32 -ctv f32", "-np 3 -c 3072"):
        assert cli.main(["plan", "-m", str(path), *options.split()]) == 0
        out = capsys.readouterr().out
        found.append((out.split(" tokens of context")[0].rpartition("; ")[2], rows(out, "total")[0][3]))
    # 4 layers with one head of 64 keys and values of 2 bytes: 1 KiB per cell. Two layers keep windows of 960 cells for
    # each of 4 slots, if that is less.
    assert found == [("4096", "3.9 MiB"), ("1024", "1.0 MiB"), ("1024", "2.0 MiB"), ("3072", "3.0 MiB")]


def test_invalid_flags_and_models(capsys: pytest.CaptureFixture[str], model_path: Path) -> None:
    assert cli.main(["plan"]) == 2 and "no model" in capsys.readouterr().err
    assert cli.main(["plan", "-m", "/nonexistent.gguf"]) == 1 and "no file" in capsys.readouterr().err
    assert cli.main(["plan", "-m", str(model_path), "--rpc", "h:x"]) == 2 and "--rpc" in capsys.readouterr().err


def test_unknown_devices_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model_path: Path
) -> None:
    given(monkeypatch, 800 * MIB, 800 * MIB)
    assert cli.main(["plan", "-m", str(model_path), "--rpc", "far:9", "-dev", "CUDA0"]) == 1
    assert "no device 'CUDA0'; there are CPU, RPC0[far:0]" in capsys.readouterr().err


# --- pieces -----------------------------------------------------------------------------------------------------------


def test_rules_of_candidates() -> None:
    sizes = ModelSizes(layers=(100,) * 4, kv=(1,) * 4, head=10, hidden=1, logits=1)

    def rules(split: SplitOptions | None) -> list[str]:
        return [one.rule for one in candidates(sizes, figures(10**6, 10**6), split)]

    assert rules(None) == ["this machine"]
    assert rules(SplitOptions(rpc=("far:0",))) == [AUTO, MEMORY]
    assert rules(SplitOptions(rpc=("far:0",), tensor_split=())) == [MEMORY, AUTO]
    assert rules(SplitOptions(rpc=("far:0",), tensor_split=(0.5, 1))) == ["--tensor-split 0.5/1", AUTO, MEMORY]


def test_comparison_with_the_memory_rule() -> None:
    sizes = ModelSizes(layers=(10**6,) * 2, kv=(0, 0), head=0, hidden=0, logits=0)
    here, there = Placement((0, 0), 0), Placement((1, 1), 1)
    found = [Candidate(AUTO, there), Candidate("x", None, NotEnoughMemory("m", {})), Candidate(MEMORY, here)]
    lines = comparison(sizes, figures(10**9, 10**9), found).splitlines()
    assert lines[0].startswith("auto: 4975.1 tokens/s, 0.20 ms per token, 9.95 times as fast")
    assert lines[1:] == ["x: does not fit", "memory: 500.0 tokens/s, 2.00 ms per token"]


def test_layers_text() -> None:
    sizes = ModelSizes(layers=(1,) * 6, kv=(0,) * 6, head=1, hidden=1, logits=1)
    placement = Placement((0, 1, 1, 0, 1, 1), 1)
    shares = predict(sizes, figures(10, 10, 10), placement).shares
    assert [layers_text(share, placement, 6) for share in shares] == ["0, 3", "1-2, 4-5, head", "individual weights"]


# --- workers ----------------------------------------------------------------------------------------------------------


class FakeWorkerDevice:
    def __init__(self, endpoint: str, broken: bool = False) -> None:
        self.name, self.endpoint, self.broken, self.closed = "?", endpoint, broken, False

    def memory(self) -> tuple[int, int]:
        if self.broken:
            raise WorkersUnreachable("gone meanwhile")
        return 1000 * MIB, 2000 * MIB

    def close(self) -> None:
        self.closed = True


def test_devices_are_listed_as_llama_cpp_lists_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workers: dict[str, Any] = {
        "a:1": [FakeWorkerDevice("a:1"), FakeWorkerDevice("a:1")],
        "c:3": [FakeWorkerDevice("c:3")],
        "d:4": [FakeWorkerDevice("d:4", broken=True)],
    }

    def connect(endpoint: object, **_: object) -> Any:
        if str(endpoint) not in workers:
            raise WorkersUnreachable("cannot connect to b:2: no route")
        return workers[str(endpoint)]

    monkeypatch.setattr("llamado.rpc.client.workers.connect", connect)
    command = ["serve", "--list-devices", "--rpc", "a:1,b:2,c:3"]
    assert cli.main(command) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Available devices:" and re.fullmatch(r"  CPU: .+ \(\d+ MiB, \d+ MiB free\)", lines[1])
    assert lines[2:] == [
        "  RPC0: a:1 (2000 MiB, 1000 MiB free)",
        "  RPC1: a:1 (2000 MiB, 1000 MiB free)",
        "  RPC2: b:2 (not available: cannot connect to b:2: no route)",
        "  RPC3: c:3 (2000 MiB, 1000 MiB free)",
    ]
    assert workers["c:3"][0].closed and workers["c:3"][0].name == "RPC3[c:3]"
    assert cli.main(["run", "--list-devices", "--rpc", "a:1,d:4"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "  RPC2: d:4 (not available: gone meanwhile)"
    assert cli.main(["bench", "--list-devices"]) == 0


def test_cards_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The list has name, description, and memory in MiB, as in llama.cpp."""
    machine = install(monkeypatch, Cards((8192 * MIB, 512 * MIB)))
    assert cli.main(["serve", "--list-devices"]) == 0
    _, here, *rest = capsys.readouterr().out.splitlines()
    assert here.startswith("  CPU: ") and rest == [
        "  CUDA0: Stand-in (8192 MiB, 8192 MiB free)",
        "  CUDA1: Stand-in (512 MiB, 512 MiB free)",
    ]
    assert all(card.closed for card in machine.opened)
    install(monkeypatch, Cards(problem="there is no driver: install it"))
    for present in (True, False):
        monkeypatch.setattr("llamado.devices.cards.has_card", lambda kind, present=present: present)
        monkeypatch.setattr("llamado.devices.accelerators.has_card", lambda kind: False)
        assert cli.main(["serve", "--list-devices"]) == 0
        rest = capsys.readouterr().out.splitlines()[2:]
        assert rest == (["  CUDA: not available: there is no driver: install it"] if present else [])


def test_a_plan_for_cards(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model_path: Path
) -> None:
    machine = install(monkeypatch, Cards((1, 1)))
    fast = {"decode": 1e12, "prefill": 1e12, "round_trip": 1e-5, "bandwidth": 1e10}
    sizes = (3000 * MIB, 3000 * MIB)

    def shown(*_: object) -> list[DeviceFigures]:
        cards = [
            DeviceFigures(name=f"CUDA{i}", local=False, accelerator=True, free=size, total=size, **fast)  # type: ignore[arg-type]
            for i, size in enumerate(sizes)
        ]
        return [*figures(800 * MIB), *cards]

    monkeypatch.setattr(planning, "_figures", shown)
    assert cli.main(["plan", "-m", str(model_path), "-c", "256"]) == 0
    text = capsys.readouterr().out
    assert text.index("auto: as much as fits the graphics cards") < text.index("memory: by free memory")
    assert "least time" not in text
    assert [row[1] for row in rows(text, "CUDA0")[1:]] == ["0-3"] * 2
    assert [row[1] for row in rows(text, "CUDA1")[1:]] == ["4-5, head"] * 2
    sizes = (1 * MIB, 1 * MIB)
    assert cli.main(["plan", "-m", str(model_path), "-c", "256"]) == 0
    text = capsys.readouterr().out
    assert rows(text, "CPU")[1][1] == "0-5, head" and "CUDA0: no layers: a layer takes" in text
    assert cli.main(["plan", "-m", str(model_path), "-c", "256", "-ngl", "3", "-fit", "off"]) == 1
    assert "-ngl 0 (the most that fits)" in capsys.readouterr().err
    n = len(machine.opened)
    assert cli.main(["plan", "-m", str(model_path), "-c", "256", "--device", "none"]) == 0
    assert len(machine.opened) == n


def test_unreachable_workers_are_all_named(capsys: pytest.CaptureFixture[str], model_path: Path) -> None:
    ports = [free_port(), free_port()]
    endpoints = ",".join(f"127.0.0.1:{port}" for port in ports)
    assert cli.main(["plan", "-m", str(model_path), "--rpc", endpoints]) == 1
    out, err = capsys.readouterr()
    assert all(f"127.0.0.1:{port}" in err for port in ports) and "Traceback" not in err and not out
    found = backend("rpc", endpoints.split(",")).connect()
    assert all(isinstance(worker, Unreachable) for worker in found)


@pytest.fixture
def ggml_worker(peer_bin: Path) -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen(
        [peer_bin / "ggml-rpc-server", "-p", str(port), "-t", "1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:

        def listens() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        until(listens)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.mark.interop
def test_plan_with_a_ggml_worker(ggml_worker: str, capsys: pytest.CaptureFixture[str], model_path: Path) -> None:
    assert cli.main(["plan", "--list-devices", "--rpc", ggml_worker]) == 0
    assert re.search(rf"  RPC0: {ggml_worker} \(\d+ MiB, \d+ MiB free\)", capsys.readouterr().out)
    assert cli.main(["plan", "-m", str(model_path), "--rpc", ggml_worker, "-ngl", "99", "-t", "1"]) == 0
    out = capsys.readouterr().out
    device, auto, memory = rows(out, f"RPC0[{ggml_worker}]")
    assert all(float(cell.replace(",", "")) > 0 for cell in device[3:])
    assert auto[1] == memory[1] == "0-5, head"


def test_processor_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert planning.processor()
    monkeypatch.setattr("builtins.open", lambda *_: (_ for _ in ()).throw(OSError()))
    monkeypatch.setattr(planning, "platform", SimpleNamespace(processor=lambda: "", machine=lambda: "riscv64"))
    assert planning.processor() == "riscv64"
