"""Mixtures, and all forms of attention and of states, on workers, ours and real ones; and for the real llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from long_text import long_text
from parity import log_softmax, logits_along
from rpc_workers import WorkerProcess, our_worker, real_worker
from saved_logits import saved_logits
from tiny import TINY, make

from llamado.devices.split.placement import SplitOptions
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import EngineOptions

pytestmark = [pytest.mark.interop, pytest.mark.full]

N_CTX = 256
EXPERTS = ((r"_exps", "CPU"),)
NAMES = [
    "qwen3moe", "glm4moe", "deepseek2", "deepseek2-expanded", "gpt-oss", "llama4", "gemma4-experts", "gemma4",
    "qwen35moe", "kimi-linear", "jamba", "hy_v4", "dots3note", "minimax-m3", "graniteswitch", "kimi-k3", "glm5-next",
    "qwen4exp", "minimax-01",
]  # fmt: skip


@pytest.fixture(scope="module")
def workers(peer_bin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[WorkerProcess]]]:
    logs = tmp_path_factory.mktemp("workers")
    with ExitStack() as stack:
        yield {
            "ours": [stack.enter_context(our_worker(logs / f"ours-{i}.log")) for i in range(2)],
            "real": [stack.enter_context(real_worker(peer_bin, logs / f"real-{i}.log")) for i in range(2)],
        }


def logprobs(path: Path, tokens: list[int], split: SplitOptions | None = None) -> np.ndarray:
    with LoadedModel.load(path, EngineOptions(n_ctx=N_CTX, n_threads=1, split=split)) as loaded:
        loaded.engine.close()  # the forward pass is driven from here
        return np.array([log_softmax(row) for row in logits_along(loaded.forward, tokens, 0)])


@pytest.mark.parametrize("name", NAMES)
def test_on_two_workers(workers: dict[str, list[WorkerProcess]], tmp_path: Path, name: str) -> None:
    """With all of it there, and with the experts here: the very bits on ours, nearly those on the real ones."""
    tokens = np.random.default_rng(2).integers(3, 300, 120).tolist()
    for kind, wtype in (("ours", "Q8_0"), ("real", "F32")):
        pair, path = workers[kind], make(TINY[name], tmp_path / f"{kind}.gguf", wtype=wtype)
        alone = logprobs(path, tokens)
        before = [worker.graphs() for worker in pair]
        for overrides in ((), EXPERTS):
            split = SplitOptions(
                rpc=tuple(worker.endpoint for worker in pair), tensor_split=(1.0, 1.0), overrides=overrides
            )
            found = logprobs(path, tokens, split)
            if kind == "ours":
                assert found.tobytes() == alone.tobytes(), overrides
            else:
                assert (found.argmax(-1) == alone.argmax(-1)).mean() > 0.99 and np.abs(found - alone).mean() < 0.001
        assert all(worker.graphs() > n for worker, n in zip(pair, before, strict=True))


@pytest.mark.parametrize(
    ("name", "flash"),
    [
        *((name, "on") for name in NAMES),
        ("deepseek2", "off"),
        ("gpt-oss", "off"),
        ("rwkv7", "on"),
        ("falcon-h1", "on"),
        ("deepseek32", "on"),
        ("maple", "on"),
        ("grovemoe", "on"),
        ("hrm_text", "on"),
        ("minimax-01", "on"),
        ("kimi-k3", "on"),
        ("glm5-next", "on"),
        ("qwen4exp", "on"),
    ],
)
def test_the_real_llama_cpp_on_our_worker(
    peer_bin: Path, workers: dict[str, list[WorkerProcess]], tmp_path: Path, name: str, flash: str
) -> None:
    """Its graph of a mixture, layer after layer, gives our numbers."""
    path = make(TINY[name], tmp_path / "m.gguf")
    text = tmp_path / "text.txt"
    text.write_text(long_text(6 * N_CTX))
    worker = workers["ours"][0]
    before = worker.graphs()
    options = ["--chunks", "1", "--rpc", worker.endpoint, "-ngl", "99", "-fa", flash]
    theirs = saved_logits(peer_bin, path, text, N_CTX, options)
    assert worker.graphs() > before
    (chunk,) = theirs.tokens
    ours = logprobs(path, chunk.tolist())[theirs.first : -1]
    assert (ours.argmax(-1) == theirs.logprobs[0].argmax(-1)).mean() > 0.99
    top = np.argsort(theirs.logprobs[0], axis=-1)[:, -10:]  # what is saved ends 16 below the greatest
    assert np.abs(np.take_along_axis(ours - theirs.logprobs[0], top, -1)).max() < 0.01
