"""Checks of whole models on a card: prompts with the CPU's bits, and answers that go on when the card is lost.

    python tests/devices/cuda/on_a_card.py [--fake] [--prompts 200] [--tokens 24] [MODEL …]

MODEL: a GGUF file, or a name that `llamado -m` takes; default: those of `CACHED` that are in the cache, and a model
with random weights. --fake: an emulated card. Prints a line for each check; the exit status is 1 if one failed.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(folder) for folder in Path(__file__).parents[2::-1]]

from ports import free_port
from tiny_models import CORPUS, make_llama

from cuda.fake_machine import install, small_card
from llamado.devices.cuda.api import Api
from llamado.devices.cuda.device import CudaDevice
from llamado.devices.split.placement import ALL_LAYERS, SplitOptions
from llamado.engine.forward.runner import ModelRunner
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import EngineOptions, FitOptions
from llamado.engine.request import Result
from llamado.errors import LlamadoError
from llamado.gguf.sources.resolve import resolve

HERE = Path(__file__).parent
CARD = SplitOptions(gpus=True, joins=False, n_gpu_layers=ALL_LAYERS, devices=("CUDA0",))
CACHED = ("smollm2", "gemma3")
_LAUNCH_FAILED = 719
_SLOTS = 8

Bits = tuple[tuple[int, ...], tuple[Any, ...]]
"""Tokens and probabilities of an answer."""


def options(split: SplitOptions | None, n_slots: int = _SLOTS) -> EngineOptions:
    return EngineOptions(n_ctx=1024 * n_slots, n_slots=n_slots, split=split, fit=FitOptions(target=(0,)))


def prompts(n: int) -> list[str]:
    """Texts of one to 60 words; each twentieth has 400."""
    words, rng = CORPUS.split(), random.Random(5)
    return [" ".join(rng.choices(words, k=400 if i % 20 == 19 else rng.randint(1, 60))) for i in range(n)]


def bits(result: Result) -> Bits:
    return tuple(result.tokens), tuple((one.token, *one.top) for one in result.probs)


def answers(llama: LoadedModel, texts: Sequence[str], tokens: int) -> list[Bits]:
    """Return the answers to prompts, several at once: half of them greedy, half sampled."""

    def answer(numbered: tuple[int, str]) -> Bits:
        number, text = numbered
        temperature = 0.0 if number % 2 else 0.8
        return bits(
            llama.complete(text, n_predict=tokens, temperature=temperature, seed=number, n_probs=3, ignore_eos=True)
        )

    with ThreadPoolExecutor(_SLOTS) as pool:
        return list(pool.map(answer, enumerate(texts)))


class LosingApi:
    """The driver of a card that fails from a moment on."""

    def __init__(self, api: Api) -> None:
        self._api, self.lost = api, False

    def call(self, name: str, *arguments: Any) -> int:
        return _LAUNCH_FAILED if self.lost else self._api.call(name, *arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)


def card_of(llama: LoadedModel) -> CudaDevice:
    """Return the card of a loaded model."""
    assert isinstance(llama.forward, ModelRunner)
    (device,) = (device for device in llama.forward.devices if isinstance(device, CudaDevice))
    return device


def interrupted(llama: LoadedModel, text: str, tokens: int, lose: Callable[[], None]) -> list[int]:
    """Return a greedy answer, in the middle of which the card is lost."""
    events = llama.events(text, n_predict=tokens, temperature=0.0, ignore_eos=True)
    found: list[int] = []
    try:
        while True:
            event = next(events)
            if len(found) < tokens // 2 <= len(found) + len(event.tokens):
                lose()
            found += event.tokens
    except StopIteration:
        return found


@contextmanager
def worker(fake: bool) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A process that serves the card. Yield its endpoint and the process."""
    port = free_port()
    command = [sys.executable, str(HERE / "fake_machine.py")] if fake else [sys.executable, "-m", "llamado"]
    process = subprocess.Popen([*command, "worker", "-d", "CUDA0", "-H", "127.0.0.1", "-p", str(port)])
    try:
        yield f"127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


class Checks:
    """Runs checks and prints a line for each."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def run(self, name: str, check: Callable[[], str]) -> None:
        """`check` returns a remark, or raises."""
        began = time.monotonic()
        try:
            remark, word = check(), "ok"
        except Exception as error:
            traceback.print_exc()
            remark, word = f"{type(error).__name__}: {error}"[:300], "FAILED"
            self.failed.append(name)
        print(f"{word:6} {name} ({time.monotonic() - began:.1f} s): {remark}", flush=True)


def compare(found: Sequence[Any], right: Sequence[Any]) -> str:
    """Return a remark; raise AssertionError if something differs."""
    differ = [i for i, (a, b) in enumerate(zip(found, right, strict=True)) if a != b]
    assert not differ, f"{len(differ)} of {len(right)} differ, the first is number {differ[0]}"
    return f"{len(right)} equal"


def check_model(checks: Checks, name: str, path: Path, flags: argparse.Namespace) -> None:
    """Run all checks on a model."""
    texts, n = prompts(flags.prompts), flags.tokens
    long = texts[0]
    with LoadedModel.load(path, options(None)) as llama:
        right = answers(llama, texts, n)
        (whole,) = (interrupted(llama, long, 2 * n, lambda: None),)

    def on_the_card() -> str:
        with LoadedModel.load(path, options(CARD)) as llama:
            return f"answers with probabilities, {compare(answers(llama, texts, n), right)}"

    def lost() -> str:
        with LoadedModel.load(path, options(CARD)) as llama:
            card = card_of(llama).card
            card._api = api = LosingApi(card._api)  # type: ignore[assignment]
            found = interrupted(llama, long, 2 * n, lambda: setattr(api, "lost", True))
            assert card.lost is not None, "it was not used"
            return f"tokens, {compare(found, whole)}"

    def killed() -> str:
        with worker(flags.fake) as (endpoint, process):
            split = SplitOptions(rpc=(endpoint,), wait=60.0, failover=0.5, n_gpu_layers=ALL_LAYERS, tensor_split=(1.0,))
            with LoadedModel.load(path, replace(options(split), split=split)) as llama:
                return f"tokens, {compare(interrupted(llama, long, 2 * n, process.kill), whole)}"

    checks.run(f"{name}: prompts on the card", on_the_card)
    checks.run(f"{name}: the card is lost in an answer", lost)
    checks.run(f"{name}: a worker with the card is killed in an answer", killed)


def cached() -> dict[str, Path]:
    """Return the models that need no network."""
    found = {}
    for name in CACHED:
        with suppress(LlamadoError):
            found[name] = resolve(name)
    return found


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=24, help="of each answer")
    parser.add_argument("--fake", action="store_true")
    flags = parser.parse_args()
    if flags.fake:
        install(small_card())
    checks = Checks()
    with tempfile.TemporaryDirectory() as folder:
        small = {"n_embd": 64, "n_ff": 64, "n_layer": 2} if flags.fake else {"n_embd": 512, "n_ff": 1024, "n_layer": 6}
        small["n_ctx"] = 4096  # the longest prompts have 1,100 tokens
        models = {name: resolve(name) for name in flags.models} or {
            "small": make_llama(Path(folder, "m.gguf"), **small)
        }
        for name, path in models.items():
            check_model(checks, name, path, flags)
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
