"""Whole files against those of the real llama-quantize, byte for byte."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from tiny_models import make_llama

from llamado.commands import cli
from llamado.gguf import GGUFFile
from llamado.quantize.file_types import COPY, FILE_TYPES, find_file_type
from llamado.quantize.imatrix import read_imatrix
from llamado.quantize.plan import QuantizeRequest, plan

pytestmark = [pytest.mark.interop, pytest.mark.full]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(
        tmp_path_factory.mktemp("m") / "model.gguf", wtype="F16", n_embd=256, n_ff=256, n_layer=9, n_head=8, n_head_kv=2
    )


@pytest.fixture(scope="module")
def imatrix(model: Path) -> Path:
    """An older importance matrix of random numbers for every weight of the model."""
    rng = np.random.default_rng(2)
    with GGUFFile.open(model) as file:
        names = {t.name: t.ne[0] for t in file.tensors.values() if t.ne[1] > 1 and t.name.startswith("blk.")}
    parts = [np.int32(len(names)).tobytes()]
    for name, n in names.items():
        sums = rng.random(n, np.float32) ** 4 + np.float32(1e-5)
        parts += [np.int32(len(name)).tobytes(), name.encode(), np.array([3, n], np.int32).tobytes(), sums.tobytes()]
    path = model.with_name("imatrix.dat")
    path.write_bytes(b"".join([*parts, np.array([3, 4], np.int32).tobytes(), b"text"]))
    return path


def compare(programs: Path, model: Path, kind: str, *flags: str) -> None:
    ours, theirs = model.with_name("ours.gguf"), model.with_name("theirs.gguf")
    command = [str(programs / "llama-quantize"), *flags, str(model), str(theirs), kind, "2"]
    subprocess.run(command, check=True, capture_output=True)
    assert cli.main(["quantize", *flags, str(model), str(ours), kind, "2"]) == 0
    assert ours.read_bytes() == theirs.read_bytes(), (kind, flags)


def compare_types(programs: Path, model: Path, kind: str, imatrix: Path) -> None:
    """Compare the type of each tensor; the blocks of each type have digests (tests/quantize/test_types.py)."""
    command = [str(programs / "llama-quantize"), "--imatrix", str(imatrix), "--dry-run", str(model), kind]
    said = subprocess.run(command, check=True, capture_output=True, text=True)
    lines = re.findall(r"\] +(\S+) +- \[.*type = +\w+, .*\((\w+)\)$", said.stdout + said.stderr, re.MULTILINE)
    found = find_file_type(kind)
    assert found is not None and len(lines) > 50
    with GGUFFile.open(model) as file:
        (one,) = plan(file, QuantizeRequest(found, imatrix=read_imatrix(imatrix))).files
    assert {step.target.name: step.target.type.name for step in one.tensor_plans if step.is_changed} == {
        name: type_.upper() for name, type_ in lines
    }


KINDS = [kind.name for kind in (*FILE_TYPES, COPY)]
NEED_IMATRIX = {"IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ1_S", "IQ1_M", "Q2_K_S", "IQ3_XXS", "IQ3_XS"}


def test_every_kind_of_file(peer_bin: Path, model: Path) -> None:
    for kind in KINDS:
        if kind not in NEED_IMATRIX:
            compare(peer_bin, model, kind)


def test_every_kind_of_file_with_an_importance_matrix(peer_bin: Path, model: Path, imatrix: Path) -> None:
    for kind in KINDS:
        if kind.startswith(("IQ1", "IQ2", "IQ3")):  # llama-quantize takes a minute to begin with each of these
            compare_types(peer_bin, model, kind, imatrix)
            continue
        compare(peer_bin, model, kind, "--imatrix", str(imatrix))


def test_flags(peer_bin: Path, model: Path, imatrix: Path) -> None:
    compare(peer_bin, model, "Q4_K_M", "--pure")
    compare(peer_bin, model, "Q3_K_L", "--leave-output-tensor", "--token-embedding-type", "q8_0")
    compare(peer_bin, model, "Q4_K_S", "--output-tensor-type", "Q5_1", "--tensor-type", "blk\\.[1-3]\\.attn_K=iq4_xs",
            "--tensor-type", "attn=nvfp4")  # fmt: skip
    compare(peer_bin, model, "Q5_K_M", "--prune-layers", "1,5")
    compare(peer_bin, model, "Q5_K_M", "--prune-layers", "0", "--imatrix", str(imatrix), "--include-weights", "ffn")
    compare(peer_bin, model, "Q2_K", "--imatrix", str(imatrix), "--exclude-weights", "attn_q")
    compare(peer_bin, model, "Q8_0", "--override-kv", "llama.context_length=int:99", "--override-kv", "a.b=str:x",
            "--override-kv", "general.name=bool:true", "--override-kv", "a.c=float:0.1")  # fmt: skip


def test_other_models(peer_bin: Path, tmp_path: Path, model: Path) -> None:
    """Rows that fit no super-block; an output that is the embedding; weights that are quantized already."""
    for kind in ("Q4_K_M", "Q2_K", "Q6_K", "IQ4_XS", "Q5_K_S", "TQ1_0"):
        compare(peer_bin, make_llama(tmp_path / "narrow.gguf", wtype="BF16", n_embd=96, tied=True), kind)
    for wtype in ("Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "IQ4_NL", "F32"):
        again = make_llama(tmp_path / "again.gguf", wtype=wtype, n_embd=256, n_ff=256)
        compare(peer_bin, again, "Q4_1", "--allow-requantize")
