"""Hadamard rotation of keys and values before quantization."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from reference import ReferenceModel
from tiny_models import make_llama

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.jit import Jit
from llamado.engine.forward.options import RunnerOptions
from llamado.engine.forward.runner import ModelRunner
from llamado.ggml import Op
from llamado.ggml.ops import MatrixHint
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType as T
from llamado.models import BatchShape, load_model
from llamado.models.hadamard import hadamard, key_rotation, value_rotation
from llamado.models.memory import KeysValues, Latent, Memory, MemoryOptions, Span

TOKENS = np.random.default_rng(5).integers(3, 300, 150).astype(np.int32)


@pytest.fixture(scope="module")
def jit() -> Jit:
    return Jit()


@pytest.mark.parametrize("n", [64, 128, 256])
def test_the_hadamard_matrix(n: int) -> None:
    """Sylvester's construction: the sign is the parity of the common bits of row and column."""
    signs = [[(-1) ** (i & j).bit_count() for j in range(n)] for i in range(n)]
    found = hadamard(n).view(np.float32).reshape(n, n)
    assert np.array_equal(found, np.array(signs, np.float32) * (np.float32(1) / np.sqrt(np.float32(n))))
    np.testing.assert_allclose(found @ found, np.eye(n), atol=1e-5)


@pytest.mark.parametrize(
    ("type", "heads", "k", "v"),
    [
        (T.Q8_0, {64}, 64, 64),
        (T.Q4_0, {128}, 128, 64),
        (T.IQ4_NL, {192}, 64, 64),
        (T.Q5_1, {256}, 256, 64),
        (T.Q8_0, {96}, 0, 0),
        (T.Q8_0, {64, 128}, 0, 0),
        (T.Q8_0, {0}, 0, 0),
        (T.Q8_0, set(), 0, 0),
        (T.F16, {64}, 0, 0),
        (T.BF16, {128}, 0, 0),
    ],
)
def test_sizes_of_rotations(type: T, heads: set[int], k: int, v: int) -> None:
    assert (key_rotation(type, heads), value_rotation(type, heads)) == (k, v)


@pytest.mark.parametrize(
    ("types", "rotated", "expected"),
    [
        ((T.Q4_0, T.Q8_0), True, [(128, 64), (256, 64), (0, 0)]),
        ((T.Q4_0, T.F16), True, [(128, 0), (256, 0), (0, 0)]),
        ((T.Q4_0, T.F16), False, [(0, 0)] * 3),
        ((T.F16, T.F16), False, [(0, 0)] * 3),
    ],
)
def test_rotations_of_layers(types: tuple[T, T], rotated: bool, expected: list[tuple[int, int]]) -> None:
    """Layers with and without a window have their own size; latent rows are never rotated."""
    layers = [KeysValues(128, 64, 32, head_k=128, head_v=64), KeysValues(256, 256, head_k=256, head_v=256), Latent(64)]
    memory = Memory(layers, MemoryOptions(n_cells=1024, type_k=types[0], type_v=types[1], rotated=rotated))
    assert [memory[layer].rotations for layer in range(3)] == expected
    assert memory.unrotated == (not rotated and T.Q4_0 in types)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("heads") / "m.gguf", n_embd=128, n_head=2, n_head_kv=1)


def test_queries_keys_values_and_output_are_rotated(path: Path) -> None:
    model = ReferenceModel(path).model
    for types, expected in (
        ((T.Q8_0, T.Q4_0), 4),
        ((T.Q8_0, T.F16), 2),
        ((T.F16, T.Q5_0), 2),
        ((T.F16, T.F32), 0),
    ):
        graph = model.build(
            BatchShape(3, 3, 256), model.memory(MemoryOptions(n_cells=256, type_k=types[0], type_v=types[1]))
        )
        rotated = [n.src[0] for n in graph.nodes if n.op is Op.MUL_MAT and n.op_params[4] == MatrixHint.HADAMARD]
        assert rotated == [graph.inputs.get("hadamard_64")] * (expected * model.hparams.n_layer)


@pytest.mark.parametrize("types", [(T.Q8_0, T.Q8_0), (T.Q8_0, T.F32), (T.F32, T.Q8_0)], ids=str)
def test_rotation_only_changes_rounding(path: Path, types: tuple[T, T]) -> None:
    tokens = TOKENS[:30].tolist()
    right = ReferenceModel(path, type_k=T.F32, type_v=T.F32).logits(tokens)
    found = ReferenceModel(path, type_k=types[0], type_v=types[1]).logits(tokens)
    assert 0 < np.abs(found - right).max() < 0.02 * right.std()


@pytest.mark.full
@pytest.mark.parametrize("types", [(T.Q4_0, T.Q4_1), (T.IQ4_NL, T.IQ4_NL), (T.Q5_0, T.Q5_1), (T.Q8_0, T.Q4_0)], ids=str)
def test_rotated_caches_give_the_same_bits_in_any_batch(path: Path, jit: Jit, types: tuple[T, T]) -> None:
    with GGUFFile.open(path) as file:
        answers = []
        for sizes in ([150], [64, 1, 37, 48], [1] * 150):
            model = load_model(file)
            runner = ModelRunner(
                file,
                model,
                [CpuDevice(2, jit=jit)],
                RunnerOptions(n_cells=256, max_batch=160, type_k=types[0], type_v=types[1]),
            )
            handle, found = runner.memory.allocate(150), []
            assert handle is not None
            for n in sizes:
                spans, rows = [Span(handle, handle.used, n)], np.arange(n, dtype=np.int32)
                found.append(runner.start(TOKENS[handle.used : handle.used + n], spans, rows).result(60).copy())
                handle.used += n
            answers.append(np.concatenate(found))
            runner.close()
    exact = ReferenceModel(path, type_k=T.F32, type_v=T.F32).logits(TOKENS.tolist(), outputs=range(150))
    assert answers[0].tobytes() == answers[1].tobytes() == answers[2].tobytes()
    assert np.abs(answers[0] - exact).mean() < 0.1 * exact.std()
