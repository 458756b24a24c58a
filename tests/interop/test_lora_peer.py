"""LoRA adapters beside the real llama.cpp: the same adapter files, scales and requests, alone and on workers.

As in `test_parity`, distributions are compared along the real server's greedy answers, with all weights in float32:
what is compared then is what adapters add, and not what rounds how.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from lora_files import make_adapter
from minilm import make_bert
from numpy.typing import NDArray
from parity import HEADER, N_TOP, Comparison, Step, compare, continuation
from peer_server import llama_server
from rpc_workers import our_worker, real_worker
from short_texts import SHORT_TEXTS
from waiting import GUARD
from weights import to_float32

from llamado.devices.split.placement import SplitOptions
from llamado.engine.forward.runner import ModelRunner
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import EngineOptions, ModelSource
from llamado.engine.request import Defaults, Result
from llamado.server.load import load_served
from llamado.server.settings import Settings

pytestmark = [pytest.mark.interop, pytest.mark.full]

N_CTX = 256
N_PREDICT = 24
AGREEMENT = 0.99
MEAN_DIFFERENCE = 0.05
# Largest difference of log-probabilities that computing them from the same logits in another way makes.
SAME = 1e-3
TEXTS = ("python", "story", "science", "recipe")
Scales = tuple[float, float]
CASES: tuple[Scales, ...] = ((0.0, 0.0), (1.0, 0.0), (0.5, 0.0), (0.5, 1.0))


@dataclass(frozen=True)
class Files:
    model: Path
    plain: Path
    """The same in float32."""
    adapters: tuple[Path, Path]

    @property
    def flags(self) -> list[str]:
        return ["--lora", str(self.adapters[0]), "--lora-scaled", f"{self.adapters[1]}:0.5"]

    def load(self, path: Path, **options: Any) -> LoadedModel:
        lora = tuple((str(adapter), 0.0) for adapter in self.adapters)
        return LoadedModel.load(
            path, EngineOptions(n_ctx=4 * N_CTX, n_slots=4, unified=False, n_ubatch=256, lora=lora, **options)
        )


@pytest.fixture(scope="module")
def files(smollm2_path: Path, peer_bin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Files]:
    folder = tmp_path_factory.mktemp("lora")
    first = make_adapter(folder / "a.gguf", smollm2_path, size=0.15)
    second = make_adapter(folder / "b.gguf", smollm2_path, parts=("attn_k", "attn_output", "ffn_up"), rank=16,
                          alpha=None, type="F16", size=0.15, seed=1)  # fmt: skip
    plain = to_float32(peer_bin, smollm2_path, folder / "float32.gguf")
    yield Files(smollm2_path, plain, (first, second))
    plain.unlink()


class ScaledForward:
    """A forward pass with adapters of one strength."""

    def __init__(self, forward: Any, scales: Scales) -> None:
        assert isinstance(forward, ModelRunner)
        self._forward, self._scales = forward, scales if any(scales) else ()
        self.max_batch, self.memory = forward.max_batch, forward.memory

    def start(self, *batch: Any) -> Future[NDArray[np.float32]]:
        return self._forward.start(*batch, scales=self._scales)


def options(*more: str) -> list[str]:
    return ["-np", "4", "-c", str(4 * N_CTX), "--no-kv-unified", "-t", "1", "-fa", "on", "--no-warmup", *more]


def field(scales: Scales) -> list[dict[str, float]]:
    return [{"id": i, "scale": scale} for i, scale in enumerate(scales)]


def prompts(llama: LoadedModel) -> dict[str, list[int]]:
    texts = {name: SHORT_TEXTS[name] for name in TEXTS}
    return {name: llama.tokenize(text, add_special=True) for name, text in texts.items() if isinstance(text, str)}


def show(*lines: str) -> None:
    print("", *lines, sep="\n", file=sys.stderr)


Answers = dict[tuple[Scales, str], list[Step]]


def ask_all(client: httpx.Client, llama: LoadedModel, asked: Sequence[tuple[Scales, str]]) -> Answers:
    """All at once; the scales of each are those of its request."""
    texts = prompts(llama)
    with ThreadPoolExecutor(4) as threads:
        answers = threads.map(
            lambda case: continuation(
                client, llama.tokenizer, texts[case[1]], lora=field(case[0]), n_predict=N_PREDICT
            ),
            asked,
        )
        return dict(zip(asked, answers, strict=True))


def ours(llama: LoadedModel, asked: Sequence[tuple[Scales, str]]) -> list[Result]:
    texts = prompts(llama)
    with ThreadPoolExecutor(4) as threads:
        return list(
            threads.map(
                lambda case: llama.complete(
                    texts[case[1]], n_predict=N_PREDICT, n_probs=N_TOP, temperature=0.0, lora=dict(enumerate(case[0]))
                ),
                asked,
            )
        )


def numbers(results: Sequence[Result]) -> list[tuple[list[int], Any]]:
    return [(result.tokens, result.probs) for result in results]


# The real server gets its memory ready anew whenever the adapters change: it is asked for one set after the other.
ASKED = [(scales, name) for scales in CASES for name in TEXTS]


def test_distributions(files: Files, peer_bin: Path, tmp_path: Path) -> None:
    """Scales for all and scales of requests, in turns and mixed; and what our engine writes for the same requests."""
    cache = ["-ctk", "f32", "-ctv", "f32"]
    with files.load(files.plain, type_k="f32", type_v="f32", n_threads=2) as llama:
        texts = prompts(llama)
        with llama_server(peer_bin, files.plain, tmp_path / "server.log", *options(*cache, *files.flags)) as client:
            shown = client.get("/lora-adapters").json()
            assert [(adapter["path"], adapter["scale"]) for adapter in shown] == [
                (str(files.adapters[0]), 1.0),
                (str(files.adapters[1]), 0.5),
            ]
            answers = ask_all(client, llama, ASKED)
            as_set = {}
            for scales in CASES[1:3]:
                assert client.post("/lora-adapters", json=field(scales)).json() == {"success": True}
                as_set[scales] = continuation(client, llama.tokenizer, texts["story"], n_predict=N_PREDICT)
        written = ours(llama, ASKED)
        llama.engine.close()  # its sequences make room in the memory
        comparisons = {scales: Comparison() for scales in CASES}
        for (scales, name), steps in answers.items():
            compare(comparisons[scales], name, ScaledForward(llama.forward, scales), texts[name], steps)  # type: ignore[arg-type]
        for scales, steps in as_set.items():
            compare(comparisons[scales], "as set", ScaledForward(llama.forward, scales), texts["story"], steps)  # type: ignore[arg-type]
        # The comparison can fail: with other scales they are far apart.
        other = Comparison()
        compare(other, "other", ScaledForward(llama.forward, (0.9, 0.0)), texts["story"], answers[(1.0, 0.0), "story"])  # type: ignore[arg-type]
    show(HEADER, *(comparison.row(f"scales {scales}") for scales, comparison in comparisons.items()))
    show(other.row("0.9 in place of 1"))
    for comparison in comparisons.values():
        assert comparison.positions >= 80
        assert comparison.agreement >= AGREEMENT and comparison.mean_difference <= MEAN_DIFFERENCE
    assert other.mean_difference > 10 * comparisons[1.0, 0.0].mean_difference
    same = sum(
        [step.token for step in steps][: len(result.tokens)] == result.tokens
        for steps, result in zip(answers.values(), written, strict=True)
    )
    show(f"{same} of {len(ASKED)} greedy answers are the same")
    assert same >= 0.8 * len(ASKED)
    assert len({tuple(steps[0].top) for steps in answers.values()}) == len(ASKED), "every adapter does something"


def test_on_workers(files: Files, peer_bin: Path, tmp_path: Path) -> None:
    """The bits of one machine on workers of ours, the numbers of one machine on a real one."""
    asked = [(scales, "story") for scales in CASES]
    with files.load(files.model, n_threads=1) as llama:
        alone = ours(llama, asked)
        with our_worker(tmp_path / "1.log") as first, our_worker(tmp_path / "2.log") as second:
            split = SplitOptions(rpc=(first.endpoint, second.endpoint), tensor_split=(1.0, 1.0))
            with files.load(files.model, n_threads=1, split=split) as divided:
                assert numbers(ours(divided, asked)) == numbers(alone)
            assert first.graphs() > N_PREDICT and second.graphs() > N_PREDICT
    with files.load(files.plain, n_threads=1) as llama, real_worker(peer_bin, tmp_path / "real.log") as real:
        split = SplitOptions(rpc=(real.endpoint,), tensor_split=(1.0,))
        with files.load(files.plain, n_threads=1, split=split) as divided:
            results = ours(divided, asked)
        assert real.graphs() > N_PREDICT
        comparison = Comparison()
        for (scales, name), result in zip(asked, results, strict=True):
            steps = [Step(p.token.id, tuple((top.id, top.logprob) for top in p.top)) for p in result.probs]
            compare(comparison, name, ScaledForward(llama.forward, scales), prompts(llama)[name], steps)  # type: ignore[arg-type]
        show(HEADER, comparison.row("on a real worker"))
        assert comparison.agreement >= AGREEMENT and comparison.mean_difference <= MEAN_DIFFERENCE


def test_the_real_server_on_our_worker(files: Files, peer_bin: Path, tmp_path: Path) -> None:
    """Its graphs with adapters are ours: the very numbers."""
    asked = [(scales, "story") for scales in CASES[:3]]
    with files.load(files.model, n_threads=1) as llama, our_worker(tmp_path / "worker.log") as worker:
        remote = ["--rpc", worker.endpoint, "-ngl", "99", "-fit", "off"]
        with llama_server(peer_bin, files.model, tmp_path / "s.log", *options(*remote, *files.flags)) as client:
            answers = ask_all(client, llama, asked)
        assert worker.graphs() > N_PREDICT
        comparison = Comparison()
        for (scales, name), steps in answers.items():
            compare(comparison, name, ScaledForward(llama.forward, scales), prompts(llama)[name], steps)  # type: ignore[arg-type]
        show(HEADER, comparison.row("the real server on our worker"))
        assert max(comparison.differences) <= SAME


def test_embeddings(peer_bin: Path, tmp_path: Path) -> None:
    """An encoder's vectors with an adapter, as set for all."""
    model = make_bert(tmp_path / "m.gguf")
    adapter = make_adapter(tmp_path / "a.gguf", model, parts=("attn_q", "attn_output", "ffn_up", "ffn_down"), size=0.3)
    tokens = [5, 6, 7, 8, 9, 10]
    engine = EngineOptions(n_ctx=128, n_threads=1, n_slots=1, embeddings=True, lora=((str(adapter), 1.0),))
    ours = load_served(
        Settings(source=ModelSource(spec=str(model)), engine=engine, defaults=Defaults()), lambda *_: None
    )
    flags = ["--embeddings", "--lora", str(adapter), "-c", "128", "-t", "1", "--no-warmup"]
    with llama_server(peer_bin, model, tmp_path / "server.log", *flags) as client:
        seen = []
        for scale in (1.0, 0.0, 0.5):
            client.post("/lora-adapters", json=[{"id": 0, "scale": scale}]).raise_for_status()
            ours.engine.set_lora({0: scale})  # type: ignore[attr-defined]
            theirs = np.array(client.post("/embedding", json={"content": tokens}).json()[0]["embedding"][0])
            assert ours.embeddings is not None
            vector = ours.embeddings.embedder.submit([tokens]).result(GUARD)[0].vectors[0]
            vector = vector / np.linalg.norm(vector)
            assert float(vector @ theirs) > 0.9999, scale
            seen.append(theirs)
    ours.close(0.0)
    assert all(float(seen[0] @ other) < 0.999 for other in seen[1:]), "the adapter does something"
