"""Context sizes that fit the memory, and the warnings about them in server logs and in the output of `plan`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_llama

from llamado.commands import cli, plan
from llamado.commands.serve import serve_settings
from llamado.devices.cpu.device import CpuDevice
from llamado.devices.split.placement import DeviceFigures, NotEnoughMemory, SplitOptions
from llamado.engine import loaded_model
from llamado.engine.forward.fitting import Fit, MemoryRequest, fit, placed, sizes_for
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import EngineOptions, FitOptions
from llamado.flags import parse
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType
from llamado.models import load_model

TRAINED = 65536
LEAST_CONTEXT = FitOptions().least_context


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("fitting")
    make_llama(found / "tiny.gguf", n_vocab=320, n_ctx=TRAINED, n_ff=16384, wtype="Q8_0")
    return found


@pytest.fixture(params=[True, False], ids=["mapped", "read"])
def file(folder: Path, request: pytest.FixtureRequest) -> Iterator[GGUFFile]:
    with GGUFFile.open(folder / "tiny.gguf", mmap=request.param) as found:
        yield found


def wanted(n_ctx: int = 0, n_slots: int = 1, unified: bool = True) -> MemoryRequest:
    return MemoryRequest(n_ctx, n_slots, unified, 512, TensorType.F16, TensorType.F16)


def need(file: GGUFFile, n_ctx: int) -> int:
    """Return the bytes of weights, caches and working memory with so many tokens of context."""
    sizes = sizes_for(file, load_model(file), wanted(), n_ctx)
    return sizes.weights + sum(sizes.kv) + sizes.compute + sizes.head_compute


def here(free: int) -> DeviceFigures:
    return DeviceFigures(name="CPU", local=True, free=free, total=free, decode=1e9, prefill=1e9)


def fitted(file: GGUFFile, free: int, n_ctx: int = 0, n_slots: int = 1, unified: bool = True) -> Fit:
    return fit(file, load_model(file), wanted(n_ctx, n_slots, unified), [here(free)], None)


@pytest.mark.slow
def test_enough_memory_changes_nothing_and_logs_nothing(file: GGUFFile) -> None:
    for n_ctx, tokens in ((0, TRAINED), (1024, 1024), (TRAINED, TRAINED)):
        found = fitted(file, need(file, tokens), n_ctx)
        assert (found.n_ctx_slot, found.n_cells, found.notes) == (tokens, tokens, ())


@pytest.mark.parametrize("n_ctx", [0, 40000], ids=["the model's own", "-c"])
def test_context_is_cut_to_the_free_memory(file: GGUFFile, n_ctx: int) -> None:
    free = need(file, 20000)
    found = fitted(file, free, n_ctx)
    assert need(file, found.n_cells) <= free < need(file, found.n_cells + 256), "the context uses all memory that fits"
    assert found.n_ctx_slot == found.n_cells == sum(found.sizes.kv) // 512
    assert placed(found.sizes, [here(free)], None) == found.placement
    (note,) = found.notes
    whose = "-c" if n_ctx else "the model's own"
    assert note.startswith(f"the context is cut from {n_ctx or TRAINED} tokens ({whose}) to {found.n_cells}: ")
    assert re.search(r"CPU needs [\d,.]+ MiB \(weights [\d,.]+ MiB, K/V cache [\d,.]+ MiB, compute [\d,.]+ MiB\)", note)
    assert re.search(r"has [\d,.]+ MiB free: [\d,.]+ MiB missing", note)
    for option in ("(-c)", "-ctk q8_0", "--rpc", "smaller quantization"):
        assert option in note


def test_context_is_not_cut_below_the_minimum(file: GGUFFile) -> None:
    assert fitted(file, need(file, LEAST_CONTEXT)).n_cells == LEAST_CONTEXT
    sizes = sizes_for(file, load_model(file), wanted(), LEAST_CONTEXT)
    with pytest.raises(NotEnoughMemory, match="not enough memory: CPU needs"):
        fitted(file, need(file, LEAST_CONTEXT) - sizes.weights - 1)
    with pytest.raises(NotEnoughMemory, match="not enough memory: CPU needs"):
        fitted(file, need(file, 1024) - sizes.weights - 1, 1024)  # a smaller context is only given on request


def test_mapped_weights_may_be_more_than_memory(file: GGUFFile) -> None:
    sizes = sizes_for(file, load_model(file), wanted(), LEAST_CONTEXT)
    free = need(file, LEAST_CONTEXT) - sizes.weights // 2
    if not file.mapped:
        with pytest.raises(NotEnoughMemory):
            fitted(file, free)
        return
    found = fitted(file, free)
    assert LEAST_CONTEXT <= found.n_cells < TRAINED and "again and again" in found.notes[0]
    assert need(file, found.n_cells) - sizes.weights <= free, "caches and working memory cannot be read from a file"
    found = fitted(file, free, 2048)
    assert found.n_cells == 2048
    assert found.notes == () or "again and again" in found.notes[0]


def test_error_suggests_only_options_that_help(file: GGUFFile) -> None:
    sizes = sizes_for(file, load_model(file), wanted(), 512)
    with pytest.raises(NotEnoughMemory) as error:
        placed(sizes, [here(sizes.weights // 2)], None)
    assert "-ctk" not in str(error.value) and "smaller quantization" in str(error.value)
    far = DeviceFigures(name="RPC0[h:1]", local=False, free=1, total=1, decode=1e9)
    with pytest.raises(NotEnoughMemory, match="one more worker"):
        placed(sizes, [here(1), far], SplitOptions(rpc=("h:1",), tensor_split=(1.0,)))


def allowed(**more: Any) -> MemoryRequest:
    return wanted()._replace(fit=FitOptions(**more))


def test_fit_target_leaves_memory_free(file: GGUFFile) -> None:
    model, margin = load_model(file), 8 << 20
    total = need(file, 20000) + margin
    lines = []
    for target in ((margin,), (3 << 20, margin)):  # the second of two applies to this machine if there is one worker
        far = DeviceFigures(name="RPC0[h:1]", local=False, free=1 << 40, total=1 << 40, decode=1e9, prefill=1e9)
        split = SplitOptions(rpc=("h:1",), n_gpu_layers=0) if len(target) == 2 else None
        figures = [here(total)] if split is None else [here(total), far]
        found = fit(file, model, allowed(target=target), figures, split)
        assert found.n_cells == 20224
        lines += found.notes
    assert "Of what is free 8.0 MiB are left to others (--fit-target)" in lines[0] and "3.0 MiB/8.0 MiB" in lines[1]
    # The margin is taken from this machine's total memory; memory that other programs use counts towards it.
    busy = DeviceFigures(name="CPU", local=True, free=need(file, 20000), total=total, decode=1e9, prefill=1e9)
    assert fit(file, model, allowed(target=(margin,)), [busy], None).n_cells == found.n_cells
    # A margin that cannot be kept is dropped.
    found = fit(file, model, allowed(target=(1 << 40,)), [here(need(file, TRAINED))], None)
    assert (found.n_cells, found.notes) == (TRAINED, ())


def test_fit_target_applies_to_workers(file: GGUFFile) -> None:
    far = DeviceFigures(name="RPC0[h:1]", local=False, free=need(file, 9000) + (8 << 20), total=1 << 40, decode=1e10)
    split = SplitOptions(rpc=("h:1",), n_gpu_layers=3)
    found = fit(file, load_model(file), allowed(target=(8 << 20,)), [here(1 << 40), far], split)
    assert LEAST_CONTEXT <= found.n_cells < 9300 and "(--fit-target)" in found.notes[0]


def test_only_allowed_settings_change(file: GGUFFile) -> None:
    with pytest.raises(NotEnoughMemory):
        fit(file, load_model(file), allowed(on=False), [here(need(file, 20000) - file.nbytes)], None)
    free = need(file, 2000)
    found = fit(file, load_model(file), allowed(least_context=1000, batch=True, cache=True), [here(free)], None)
    assert 1000 <= found.n_cells <= 2048 and found.wanted.max_batch == 512
    assert found.wanted.type_k is TensorType.F16 and len(found.notes) == 1


def test_batches_and_then_the_cache_become_smaller(file: GGUFFile) -> None:
    model, least = load_model(file), wanted()
    plain = sizes_for(file, model, least, LEAST_CONTEXT)

    def least_need(n_batch: int, type: TensorType = TensorType.F16) -> int:
        sizes = sizes_for(file, model, least._replace(max_batch=n_batch, type_k=type, type_v=type), LEAST_CONTEXT)
        return sizes.weights + sum(sizes.kv) + sizes.compute + sizes.head_compute

    for n_batch in (256, 128, 64):
        free = least_need(n_batch)
        found = fit(file, model, allowed(batch=True, cache=True), [here(free)], None)
        assert (found.n_cells, found.wanted.max_batch, found.wanted.type_k) == (LEAST_CONTEXT, n_batch, TensorType.F16)
        assert f"batches are cut from 512 tokens (-ub) to {n_batch}: not enough memory" in found.notes[0]
        assert placed(found.sizes, [here(free)], None) == found.placement
    assert least_need(64) - least_need(64, TensorType.Q8_0) > (1 << 19), "otherwise the next check is void"
    found = fit(file, model, allowed(batch=True, cache=True), [here(least_need(64, TensorType.Q8_0))], None)
    assert (found.wanted.max_batch, found.wanted.type_k, found.wanted.type_v) == (64, TensorType.Q8_0, TensorType.Q8_0)
    assert "the K/V cache is q8_0 instead of f16 (-ctk)" in found.notes[0]
    found = fit(file, model, allowed(cache=True), [here(least_need(512, TensorType.Q8_0))], None)
    assert (found.wanted.max_batch, found.wanted.type_k) == (512, TensorType.Q8_0)
    given = allowed(batch=True, cache=True)._replace(type_k=TensorType.Q8_0, type_v=TensorType.Q8_0)
    assert fit(file, model, given, [here(least_need(64, TensorType.Q8_0))], None).wanted.type_k is TensorType.Q8_0
    with pytest.raises(NotEnoughMemory) as error:  # the error names the memory that even the smallest settings need
        fit(file, model, allowed(batch=True, cache=True), [here(plain.weights // 2)], None) if file.mapped else None
        fit(file, model, allowed(batch=True, cache=True), [here(1 << 20)], None)
    assert error.value.missing["CPU"] <= least_need(64, TensorType.Q8_0)


@pytest.mark.slow
def test_model_runs_with_the_fitted_sizes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "llamado")
    with GGUFFile.open(folder / "tiny.gguf") as file:
        sizes = sizes_for(file, load_model(file), wanted()._replace(max_batch=64), LEAST_CONTEXT)
    free = sizes.weights + sum(sizes.kv) + sizes.compute + sizes.head_compute
    monkeypatch.setattr(loaded_model, "figures_of", lambda _: here(free))
    with LoadedModel.load(folder / "tiny.gguf", EngineOptions(fit=FitOptions(batch=True), n_threads=1)) as llama:
        assert (llama.forward.max_batch, llama.forward.memory.n_cells) == (64, LEAST_CONTEXT)
        assert re.search(
            r"context of 4096 tokens, 4096 for a slot; K/V cache f16/f16, 2\.0 MiB; weights 13 MiB; batches of 64 ",
            caplog.text,
        )
        assert len(llama.complete("one two three " * 40, n_predict=3, ignore_eos=True).tokens) == 3


def test_context_beyond_training_is_cut_and_logged(file: GGUFFile) -> None:
    found = fitted(file, 1 << 40, 3 * TRAINED)
    assert found.n_ctx_slot == TRAINED
    assert found.notes == (
        f"a slot's context is cut from {3 * TRAINED} tokens to {TRAINED}: the model was trained with no more",
    )
    divided = fitted(file, 1 << 40, 3 * TRAINED, n_slots=4, unified=False)
    assert divided.n_ctx_slot == 3 * TRAINED // 4 and divided.notes == ()


def test_slots_divide_the_fitted_context(file: GGUFFile) -> None:
    found = fitted(file, need(file, 20000), 40000, n_slots=4, unified=False)
    assert 4 * found.n_ctx_slot <= found.n_cells <= 20000 + 4 * 256 and need(file, found.n_cells) <= need(file, 20000)


def test_fit_gives_each_slot_the_training_context(file: GGUFFile) -> None:
    """With --fit, each slot gets the training context by default; without it, all slots share one, as in llama.cpp."""
    model, divided = load_model(file), wanted(n_slots=4, unified=False)
    found = fit(file, model, divided, [here(1 << 40)], None)
    assert (found.n_ctx_slot, found.n_cells, found.notes) == (TRAINED, 4 * TRAINED, ())
    off = divided._replace(fit=FitOptions(on=False))
    assert fit(file, model, off, [here(1 << 40)], None).n_cells == TRAINED
    assert fit(file, model, wanted(n_slots=4), [here(1 << 40)], None).n_cells == TRAINED
    found = fit(file, model, divided, [here(need(file, 4 * LEAST_CONTEXT))], None)
    assert found.n_ctx_slot == LEAST_CONTEXT
    with pytest.raises(NotEnoughMemory):  # each slot needs the minimum
        fit(file, model, divided, [here(need(file, 3 * LEAST_CONTEXT) - file.nbytes)], None)


def test_context_of_a_split_model_is_cut(file: GGUFFile) -> None:
    far = DeviceFigures(name="RPC0[h:1]", local=False, free=need(file, 9000), total=1 << 40, decode=1e10, prefill=1e9)
    split = SplitOptions(rpc=("h:1",), n_gpu_layers=3)
    found = fit(file, load_model(file), wanted(), [here(1 << 40), far], split)
    assert LEAST_CONTEXT <= found.n_cells < 9300 and set(found.placement.layers) == {1}
    assert "RPC0[h:1] needs" in found.notes[0]


@pytest.mark.slow
def test_server_and_plan_log_the_same_warnings(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with GGUFFile.open(folder / "tiny.gguf") as file:
        free = [need(file, 20000)]
    monkeypatch.setattr(CpuDevice, "memory", lambda _: (free[0], 2 * free[0]))
    monkeypatch.setattr(plan, "_figures", lambda *_: [replace(here(free[0]), total=2 * free[0])])
    caplog.set_level("INFO", "llamado")
    for options in ("", "-c 50000", "-c 300000"):
        arguments = ["-m", str(folder / "tiny.gguf"), "-t", "1", *options.split()]
        settings = serve_settings(parse(cli.make_parser("serve"), "serve", arguments, {})[0])
        caplog.clear()
        with LoadedModel.load(settings.source, settings.engine) as llama:
            n_cells = llama.forward.memory.n_cells
        notes = [line for line in caplog.messages if "is cut from" in line]
        assert notes and n_cells < 21000
        assert cli.main(["plan", *arguments]) == 0
        out, err = capsys.readouterr()
        assert all(note in err for note in notes) and f"{n_cells} tokens of context" in out
    free[0] = 1 << 20
    assert cli.main(["plan", *arguments]) == 1 and "not enough memory: CPU needs" in capsys.readouterr().err
    with pytest.raises(NotEnoughMemory, match="CPU needs"):
        LoadedModel.load(settings.source, settings.engine)


@pytest.mark.parametrize(("n_slots", "unified"), [(1, True), (2, True), (2, False)])
def test_cells_beyond_the_training_context_are_not_allocated(folder: Path, n_slots: int, unified: bool) -> None:
    with GGUFFile.open(folder / "tiny.gguf") as file:
        found = fitted(file, 1 << 40, 5 * TRAINED, n_slots, unified)
        assert (found.n_ctx_slot, found.n_cells) == (TRAINED, n_slots * TRAINED)
        (note,) = found.notes
        slot = 5 * TRAINED if unified else 5 * TRAINED // n_slots
        assert note.startswith(f"a slot's context is cut from {slot} tokens to {TRAINED}")
        driven = wanted(5 * TRAINED, n_slots, unified)._replace(beyond_training=True)
        assert fit(file, load_model(file), driven, [here(1 << 40)], None).n_cells == 5 * TRAINED
