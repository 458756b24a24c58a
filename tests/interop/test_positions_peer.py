"""Positions stretched in every way: our distributions against those of the real llama.cpp under the same flags."""

from __future__ import annotations

from pathlib import Path

import pytest
from compared import AGREEMENT, MEAN_DIFFERENCE, compare
from tiny import TINY, make

from llamado.commands.options import engine_options
from llamado.flags import FlagParser, add_flags, parse

pytestmark = [pytest.mark.interop, pytest.mark.full]

FLAGS = (
    "",
    "--rope-freq-base 30000",
    "--rope-scale 4",
    "--rope-freq-scale 0.3",
    "--rope-scaling none --rope-scale 4",
    "--rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 128",
    "--rope-scaling yarn --rope-freq-scale 0.4 --yarn-ext-factor 0.6 --yarn-beta-fast 8 --yarn-beta-slow 0.5",
    "--yarn-attn-factor 1.3",
    "--yarn-ext-factor 0.5 --rope-scale 2 --yarn-orig-ctx 64",
)
YARN = "rope.scaling.type=str:yarn", "rope.scaling.factor=float:3", "rope.scaling.original_context_length=int:100"
CASES = [
    *(("llama", flags, 512) for flags in FLAGS),
    *(("gemma3", flags, 512) for flags in FLAGS[1:3] + FLAGS[5:6]),
    *(("cohere2", flags, 512) for flags in FLAGS[1:3]),
    *(("gemma2", flags, 512) for flags in FLAGS[1:3]),
    *(("mistral3", flags, 512) for flags in (FLAGS[5], "--yarn-orig-ctx 64 --yarn-beta-fast 2")),
    *(("deepseek2", flags, 512) for flags in FLAGS[5:7]),
    *(("llama4", flags, 512) for flags in FLAGS[1:3]),
    *(("gpt-oss", flags, 512) for flags in FLAGS[1:3]),
    ("hunyuan-dense", FLAGS[1], 512),
    ("olmo2", FLAGS[1], 512),
    ("granite", FLAGS[2], 512),
    *(("llama-longrope", flags, n_ctx) for n_ctx in (256, 512) for flags in (*FLAGS[:2], FLAGS[7])),
    *(("phi3-longrope", "", n_ctx) for n_ctx in (256, 512)),
    ("llama", "--override-kv " + ",".join(f"llama.{value}" for value in YARN), 512),
    ("llama", "--override-kv llama.rope.freq_base=float:500,llama.attention.layer_norm_rms_epsilon=float:0.01", 512),
]


@pytest.mark.parametrize(("name", "flags", "n_ctx"), CASES)
def test_equals_llama_cpp_with_scaled_positions(
    peer_bin: Path, tmp_path: Path, name: str, flags: str, n_ctx: int
) -> None:
    given = flags.split()
    parsed, _ = parse(add_flags_to(FlagParser(allow_abbrev=False)), "run", given)
    found = compare(peer_bin, make(TINY[name], tmp_path / "m.gguf"), n_ctx, given, engine_options(parsed, n_slots=1))
    assert found.n >= 240 and found.n_different > 10  # the model says something
    assert found.agreement >= AGREEMENT and found.mean_difference <= MEAN_DIFFERENCE, found


def add_flags_to(parser: FlagParser) -> FlagParser:
    add_flags(parser, "run")
    return parser
