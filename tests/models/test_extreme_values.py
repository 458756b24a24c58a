"""Extreme values of every hyper-parameter: the model loads or a named error is raised, without using much memory."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import astuple, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGUFValueType as V
from lora_files import make_adapter
from minilm import make_bert
from tiers import chosen
from tiny import TINY, make
from tiny.gemma import gemma3n
from tiny_models import make_llama

from llamado.devices.compile.compiler import Compiler
from llamado.devices.cpu.device import cpu_target
from llamado.devices.cpu.lowerings import PORTABLE
from llamado.devices.cpu.memory import CpuBuffer
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import EngineOptions
from llamado.errors import LlamadoError
from llamado.gguf.errors import GgufError
from llamado.gguf.metadata import StringArray
from llamado.gguf.reader import GGUFFile
from llamado.models import (
    ARCHITECTURES,
    BatchShape,
    InvalidAdapter,
    InvalidModel,
    Output,
    UnsupportedModel,
    load_adapters,
    load_model,
)
from llamado.models.architectures.gemma import gemma3n as gemma3n_module
from llamado.models.keys import BOOLS, FLOATS, INTEGERS, STRINGS, Keys, RopeOptions
from llamado.models.memory import MemoryOptions
from llamado.text.errors import TokenizerError
from llamado.text.tokenizer.tokenizer import load_tokenizer

FEW_LAYERS = 4
MAKERS: dict[str, Callable[[Path], Path]] = {
    tiny.architecture: partial(make, tiny) for tiny in TINY.values() if not tiny.variant
} | {"gemma3n": partial(make, gemma3n(FEW_LAYERS))}
VOCABULARIES = {"words": make_bert, "byte pairs": MAKERS["llama"], "sentences": MAKERS["gemma3"]}
NAMED = (GgufError, InvalidModel, UnsupportedModel, InvalidAdapter, TokenizerError)

INTS = (0, 1, -1, 2, 3, 7, 3 * 10**8, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63))
NUMBERS = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e-38, 3e38, -3e38, 1e300, math.nan, math.inf, -math.inf, 0.5, 2.0, 1e-4, 1e6)
ARRAYS = (np.array([], np.uint32), np.array([1], np.int32), np.array([1, 2**31 - 1], np.int32), np.full(2, np.nan))
OTHERS = (True, False, "", "yarn", "none", StringArray.of(["a"]), [np.zeros(2, np.int8)], *ARRAYS)
VALUES: tuple[Any, ...] = (*INTS, *NUMBERS, *OTHERS)
HYPER_PARAMETERS = (*INTEGERS, *FLOATS, *BOOLS, *STRINGS)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, GGUFFile]]:
    folder = tmp_path_factory.mktemp("models")
    opened = {name: GGUFFile.open(make(folder / f"{name}.gguf")) for name, make in MAKERS.items()}
    yield opened
    for file in opened.values():
        file.close()


@pytest.fixture(autouse=True)
def few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the twenty layers of Gemma 3n with own keys and values, which take as long as all other architectures."""
    monkeypatch.setattr(gemma3n_module, "_OWN_LAYERS", FEW_LAYERS - 2)


@pytest.fixture(autouse=True)
def no_more_memory() -> Iterator[None]:
    """Limit the address space: an unchecked size raises MemoryError instead of using all memory."""
    if sys.platform != "linux":
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (3 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def kind(value: Any, name: str = "") -> Any:
    """Return the properties of a hyper-parameter that determine the graph and its machine code.

    Floats are arguments of machine code; only 0, 1, the sign and the range of float32 matter. Context lengths are
    compared with a graph's cells (256) and must fit an int32. Other values are returned unchanged.
    """
    if isinstance(value, float):
        return value == 0, value == 1, value < 0, abs(value) < 3.4e38
    if name.startswith("n_ctx"):
        return value > 256, value.bit_length() > 31
    if is_dataclass(value):
        return tuple(kind(getattr(value, field.name), field.name) for field in fields(value))
    return tuple(map(kind, value)) if isinstance(value, tuple) else value


def compile_(file: GGUFFile, seen: set[Any]) -> None:
    """Load the model and, once per kind of hyper-parameters, compile a graph."""
    model = load_model(file)
    if (found := kind(model.hparams)) in seen:
        return
    seen.add(found)
    output = Output.LOGITS if model.generates else Output.HIDDEN
    kv = model.memory(MemoryOptions(n_cells=256))
    graph = model.build(BatchShape(2, 1, 256, output), kv)
    for tensor in (*model.weights.values(), *kv.tensors, *graph.inputs.values()):
        tensor.buffer = CpuBuffer.allocate(tensor.nbytes)
    Compiler(graph, cpu_target(PORTABLE, 1)).compile()


def test_every_architecture_has_a_maker() -> None:
    assert MAKERS.keys() == ARCHITECTURES.keys()


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> dict[str, None]:
    """Return the keys that models read, in order."""
    found: dict[str, None] = {}
    real = Keys.name

    def name(keys: Keys, suffix: str) -> str:
        if suffix in HYPER_PARAMETERS:
            found[suffix] = None
        return real(keys, suffix)

    monkeypatch.setattr(Keys, "name", name)
    return found


def as_they_come(read: dict[str, None]) -> Iterator[str]:
    """Yield all keys, including those read only because of another key's value."""
    tried: set[str] = set()
    while left := [key for key in read if key not in tried]:
        tried.update(left)
        yield from left


@pytest.mark.slow
@pytest.mark.parametrize("name", chosen(MAKERS, ("qwen3moe",)))
def test_hyper_parameters(files: dict[str, GGUFFile], read: dict[str, None], name: str) -> None:
    file = files[name]
    seen: set[Any] = set()
    compile_(file, seen)
    good = file.metadata
    # Only YaRN uses all rope keys.
    yarn = {f"{name}.rope.scaling.type": "yarn", f"{name}.rope.scaling.factor": 4.0}
    try:
        for key in as_they_come(read):
            full = key if key.startswith("tokenizer.") else f"{name}.{key}"
            for value in VALUES:
                for others in ({}, yarn) if key.startswith("rope") else ({},):
                    file.metadata = good.with_values({**others, full: value})
                    try:
                        compile_(file, seen)
                    except NAMED:
                        continue
                    except Exception as error:
                        pytest.fail(f"{full} = {value!r}: {type(error).__name__}: {error}")
    finally:
        file.metadata = good
    assert len(seen) > 10  # graphs were compiled for the valid values


@pytest.mark.slow
@pytest.mark.parametrize("name", VOCABULARIES)
def test_the_vocabulary(tmp_path: Path, name: str) -> None:
    with GGUFFile.open(VOCABULARIES[name](tmp_path / "m.gguf")) as file:
        good = file.metadata
    keys = [key for key in good if key.startswith("tokenizer.ggml.")]
    assert len(keys) > 5
    for key in (*keys, "tokenizer.ggml.eom_token_id", "tokenizer.ggml.add_eos_token", "tokenizer.ggml.eog_token_ids"):
        for value in VALUES:
            try:
                tokenizer = load_tokenizer(good.with_values({key: value}))
                tokenizer.decode(tokenizer.encode("Who? Me.", add_special=True))
            except NAMED:
                continue
            except Exception as error:
                pytest.fail(f"{key} = {value!r}: {type(error).__name__}: {error}")


@pytest.mark.slow
def test_the_alpha_of_an_adapter(files: dict[str, GGUFFile], tmp_path: Path) -> None:
    model = load_model(files["llama"])
    for i, value in enumerate(NUMBERS):
        if abs(value) == 1e300:
            continue  # exceeds float32
        path = make_adapter(tmp_path / f"{i}.gguf", files["llama"].path, alpha=value)
        try:
            adapters = load_adapters(model, [path])
        except InvalidAdapter as error:
            assert "adapter.lora.alpha" in str(error) and str(path) in str(error)
            continue
        for weight in adapters[0].pairs:
            assert math.isfinite(adapters[0].strength(weight, 1.0))
        adapters[0].file.close()


@pytest.mark.slow
def test_rope_options(files: dict[str, GGUFFile]) -> None:
    possible = 0
    for field in fields(RopeOptions):
        values = {"scaling": (), "n_ctx_orig": INTS}.get(field.name, (*INTS, *NUMBERS))
        for value in values:
            try:
                model = load_model(files["llama"], RopeOptions(**{"scaling": "yarn", field.name: value}))
            except NAMED:
                continue
            hp, possible = model.hparams, possible + 1
            *numbers, still, sections = astuple(hp.rope)
            assert all(math.isfinite(number) for number in numbers) and still == () and sections is None
            assert 0 < hp.n_ctx_train < 2**63
            model.build(BatchShape(1, 1, 256), model.memory(MemoryOptions(n_cells=256)))
    assert possible > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "type", "value"),
    [
        ("block_count", V.UINT32, 3 * 10**8),
        ("rope.scaling.factor", V.FLOAT32, 1e-45),
        ("context_length", V.UINT32, 2**32 - 1),
        ("rope.freq_base", V.FLOAT32, math.nan),
        ("attention.layer_norm_rms_epsilon", V.FLOAT64, 1e300),
        ("attention.head_count", V.INT64, -(2**63)),
    ],
)
def test_errors_of_loaded_files_name_the_key(tmp_path: Path, key: str, type: V, value: Any) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        for values in writer.kv_data:
            values.pop(f"llama.{key}", None)
        writer.add_key_value(f"llama.{key}", value, type)

    path = make_llama(tmp_path / "model.gguf", edit=change)
    with pytest.raises(InvalidModel, match=rf"'llama\.{key}' is .* is expected"):
        LoadedModel.load(path, EngineOptions(n_ctx=64))


def test_a_context_beyond_all_memory_is_rejected(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "model.gguf", n_ctx=2**31 - 1)
    with pytest.raises(LlamadoError, match="memory"):
        LoadedModel.load(path)
