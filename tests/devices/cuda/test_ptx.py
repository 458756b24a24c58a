"""PTX of the kernels: made for every kind of card, and assembled by NVIDIA's `ptxas`."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import NamedTuple

import pytest
from running import CODEBOOKS, PLAIN, WEIGHTS
from tiny import TINY
from tiny.spec import N_VOCAB

from cuda.recorded import Recorder, operations
from llamado.devices.cuda.jit import Variant
from llamado.devices.cuda.kernel import SimtKernel, simt_trace
from llamado.devices.cuda.lowerings import nvptx

EVERY = {75: 1, 80: 8, 86: 8, 89: 8, 90: 1, 100: 8, 120: 8}
"""Compute capabilities of the kinds of cards, from Turing to Blackwell; every how many kernels are assembled."""
SPILLED_BYTES = {False: 2048, True: 0}
"""Most bytes of registers that a thread may keep in memory: in kernels that the CPU has, too, and in those of cards."""


def text_of(variant: Variant, capability: int) -> str:
    fields, trace = simt_trace(variant.kernel, [])
    architecture = nvptx.architecture(capability)
    return nvptx.ptx(trace, fields, dict(variant.parameters), "kernel", variant.threads, architecture)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [75, 90])
def test_kernels_of_a_small_model_become_ptx(capability: int, tmp_path: Path) -> None:
    recorder = Recorder((capability // 10, capability % 10))
    recorder.model("llama", tmp_path, "Q4_0")
    variants = [*recorder.variants.values()]
    assert len(variants) > 12
    for variant in variants[:: -(-len(variants) // 6)]:
        text = text_of(variant, capability)
        assert f".target sm_{capability}" in text and f".maxntid {variant.threads}" in text


class AssemblyResult(NamedTuple):
    """A kernel's report, or its error."""

    variant: str
    capability: int
    dedicated: bool = False
    """True for a kernel of cards alone."""
    registers: int = 0
    spilled: int = 0
    error: str = ""


_variants: list[Variant] = []
"""Kernels; processes inherit them."""


def assemble(number: int, capability: int, program: Path) -> AssemblyResult:
    """Make the PTX of a kernel and assemble it."""
    variant = _variants[number]
    name = f"{variant.kernel.name} {dict(variant.parameters)}"
    try:
        text = text_of(variant, capability)
    except Exception as error:
        return AssemblyResult(name, capability, error=repr(error))
    command = [str(program), f"-arch=sm_{capability}", "-v", "-o", os.devnull, "/dev/stdin"]
    found = subprocess.run(command, input=text, capture_output=True, text=True)
    if found.returncode:
        return AssemblyResult(name, capability, error=found.stderr.strip()[:300])
    (spilled,), (registers,) = (
        re.findall(pattern, found.stderr) for pattern in (r"(\d+) bytes spill stores", r"Used (\d+) registers")
    )
    return AssemblyResult(name, capability, isinstance(variant.kernel, SimtKernel), int(registers), int(spilled))


@pytest.fixture(scope="module")
def program() -> Path:
    """NVIDIA's assembler."""
    for package in ("nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12"):
        try:
            (found,) = (file for file in files(package) or () if file.name == "ptxas")
        except (PackageNotFoundError, ValueError):
            continue
        path = Path(str(found.locate()))
        path.chmod(0o755)
        return path
    pytest.skip("no ptxas: pip install nvidia-cuda-nvcc")


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Variant]]:
    """The kernels of all architectures and weight types."""
    recorder, folder = Recorder(), tmp_path_factory.mktemp("models")
    for name, tiny in TINY.items():
        if tiny.n_vocab == N_VOCAB:  # the others have the graph of one of these
            recorder.model(name, folder)
            recorder.model(name, folder, "Q8_0")
    for result in operations((*WEIGHTS, *CODEBOOKS, *PLAIN)):
        recorder.graph(result)
    _variants[:] = recorder.variants.values()
    yield _variants
    _variants.clear()


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("capability", EVERY)
def test_kernels_are_assembled(
    capability: int, variants: list[Variant], program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as pool:
        jobs = [
            pool.submit(assemble, number, capability, program) for number in range(0, len(variants), EVERY[capability])
        ]
        reports = [job.result() for job in jobs]
    spilling = [report for report in reports if report.spilled]
    with capsys.disabled():
        print(f"\nsm_{capability}: {len(reports)} kernels, at most {max(r.registers for r in reports)} registers")
        for report in sorted(spilling, key=lambda one: -one.spilled)[:40]:
            print(f"  {report.spilled} bytes spilled, {report.registers} registers: {report.variant[:150]}")
    assert not [report for report in reports if report.error]
    assert not [report for report in spilling if report.spilled > SPILLED_BYTES[report.dedicated]]
