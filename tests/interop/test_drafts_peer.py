"""Heads beside those of the real llama-server: of the same drafts, as many are right."""

from __future__ import annotations

import re
import subprocess
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from headed_models import make_dflash, make_eagle, make_headed, make_target
from peer_server import llama_server

from llamado.engine.drafts.contract import Proposal
from llamado.engine.drafts.cost import Cost
from llamado.engine.drafts.head import HeadKind
from llamado.engine.engine import Engine
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import DraftOptions, EngineOptions, ModelSource
from llamado.models.heads.next_token import HEADS

pytestmark = [pytest.mark.interop, pytest.mark.full]
PROMPTS = ([*range(3, 40)], [*range(100, 160)], [7, 7, 12, 400])
N_CTX, N_PREDICT = 512, 60


class Free(Cost):
    """Batches cost nothing."""

    def least_gain(self, n_generating: int, seconds: float = 0.0) -> float:
        return 0.0

    def drafts(self, n_generating: int) -> bool:
        return True


Drafted = list[tuple[list[int], int, int]]


def theirs(programs: Path, path: Path, kind: str, model: Path | None, log: Path, most: int, *more: str) -> Drafted:
    """Tokens of each answer, and how many tokens were drafted and right."""
    flags = ["-c", str(N_CTX), "-t", "1", "-np", "1", "-ctk", "f32", "-ctv", "f32", "-fa", "on", "--spec-type", kind]
    flags += ["--spec-draft-n-max", str(most), "--spec-draft-n-min", "0", "--spec-draft-p-min", "0"]
    flags += [*more, "-ctkd", "f32", "-ctvd", "f32", *(["-md", str(model)] if model else [])]
    found = []
    with llama_server(programs, path, log, *flags) as client:
        for prompt in PROMPTS:
            body = {"prompt": prompt, "n_predict": N_PREDICT, "temperature": 0, "return_tokens": True}
            body |= {"ignore_eos": True, "cache_prompt": False}
            answer = client.post("/completion", json=body).raise_for_status().json()
            timings = answer["timings"]
            found.append((answer["tokens"], timings["draft_n"], timings["draft_n_accepted"]))
    return found


def ours(path: Path, kind: str, model: Path | None, most: int) -> Drafted:
    source = None if model is None else ModelSource(spec=str(model))
    drafts = DraftOptions(kinds=(kind,), most=most, model=source, type_k="f32", type_v="f32")
    options = EngineOptions(n_ctx=N_CTX, n_threads=1, type_k="f32", type_v="f32", drafts=drafts)
    with LoadedModel.load(path, options) as llama:
        assert isinstance(llama.engine, Engine) and llama.engine._drafts is not None
        llama.engine._drafts.cost = Free()
        results = [
            llama.complete(prompt, n_predict=N_PREDICT, temperature=0.0, ignore_eos=True, cache_prompt=False)
            for prompt in PROMPTS
        ]
    return [(r.tokens, r.timings.draft_n or 0, r.timings.draft_n_accepted or 0) for r in results]


def rate(answers: Drafted) -> float:
    """Return the number of accepted draft tokens."""
    return sum(n for _, _, n in answers) / sum(n for _, n, _ in answers)


def compare(found: Drafted, right: Drafted, within: float = 0.07) -> None:
    """Of tokens that are nearly as probable, a rounding decides which one comes."""
    same = [(one, other) for one, other in zip(found, right, strict=True) if one[0] == other[0]]
    assert len(same) >= len(PROMPTS) - 1
    assert abs(rate([one for one, _ in same]) - rate([other for _, other in same])) < within
    assert max(n for _, n, _ in found) > 20


@pytest.mark.parametrize("name", sorted(HEADS))
def test_blocks_behind_the_layers(name: str, peer_bin: Path, tmp_path: Path) -> None:
    path = make_headed(tmp_path / "m.gguf", name, sway=0.15, quiet=True)
    for most in (1, 3):
        right = theirs(peer_bin, path, "draft-mtp", None, tmp_path / "s.log", most)
        found = ours(path, "draft-mtp", None, most)
        # Where it cannot go back to a state it reads what was right once more, and drafts nothing meanwhile.
        compare(found, right, 0.15 if name == "qwen3next" else 0.07)
        assert rate(found) > 0.4


def test_a_block_in_its_own_file(peer_bin: Path, tmp_path: Path) -> None:
    path = make_headed(tmp_path / "m.gguf", "glm4moe", sway=0.15)
    alone = make_headed(tmp_path / "mtp.gguf", "glm4moe", sway=0.15, alone=True)
    right = theirs(peer_bin, path, "draft-mtp", alone, tmp_path / "s.log", 1)
    compare(ours(path, "draft-mtp", alone, 1), right)


def test_a_smaller_model(peer_bin: Path, smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same model in fewer bits drafts for itself: of as many tokens as many are right.

    Products in few bits are not the same sums in both, so answers part where two tokens are nearly as probable.
    """
    draft = tmp_path / "q2_k.gguf"
    command = [str(peer_bin / "llama-quantize"), "--allow-requantize", str(smollm2_path), str(draft), "Q2_K"]
    subprocess.run(command, check=True, capture_output=True)
    questions = ("The capital of France is", "def add(a, b):", '{"name": "Ann", "age":', "Once upon a time",
                 "1, 2, 3, 4, 5,", "for i in range(10):\n    print(")  # fmt: skip
    with LoadedModel.load(smollm2_path, EngineOptions(n_ctx=N_CTX, n_threads=1)) as llama:
        prompts = tuple(llama.tokenize(text) for text in questions)
    monkeypatch.setattr(f"{__name__}.PROMPTS", prompts)
    right = theirs(peer_bin, smollm2_path, "draft-simple", draft, tmp_path / "s.log", 3)
    found = ours(smollm2_path, "draft-simple", draft, 3)
    same = [
        sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=True)))
        for (one, *_), (other, *_) in zip(found, right, strict=True)
    ]
    assert sum(n == N_PREDICT for n in same) >= 3, same
    for (_, n, accepted), (_, n_theirs, accepted_theirs), n_same in zip(found, right, same, strict=True):
        if n_same == N_PREDICT:
            assert abs(n - n_theirs) <= 6 and abs(accepted - accepted_theirs) <= 3
    assert abs(rate(found) - rate(right)) < 0.05 and rate(found) > 0.4


_CANDIDATE = re.compile(r"draft candidate +0, pos +(\d+): +(\d+) ")


def drafts_in(log: Path) -> list[list[int]]:
    """Return llama-server's drafts, one by one: its log has the likeliest token of each place."""
    found: list[list[int]] = []
    for place, token in _CANDIDATE.findall(log.read_text(errors="replace")):
        if place == "0":
            found.append([])
        found[-1].append(int(token))
    return found


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("draft-eagle3", {"n_drafted": 40}),
        ("draft-eagle3", {"norm_before_residual": True, "norm_before_fc": True, "own": True}),
        ("draft-dflash", {"n_drafted": 40}),
        ("draft-dflash", {"more": ("post_attention_norm.weight", "attn_sinks.weight", "layer_output_scale.weight")}),
        ("draft-dflash", {"more": ("-attn_v.weight", "post_ffw_norm.weight"), "own": True}),
        ("draft-dflash", {"attention.causal": True}),
    ],
)
def test_heads_of_their_own(
    kind: str, options: dict[str, Any], peer_bin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_target(tmp_path / "t.gguf")
    head = (make_eagle if kind == "draft-eagle3" else make_dflash)(tmp_path / "h.gguf", **options)
    compare_drafts(peer_bin, path, kind, head, tmp_path / "s.log", monkeypatch)


def test_several_blocks(peer_bin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each drafts one token more; where a rounding makes another draft right, what is drafted next differs."""
    path = make_headed(tmp_path / "m.gguf", "mimo2", sway=0.3, n_heads=3)
    compare_drafts(peer_bin, path, "draft-mtp", None, tmp_path / "s.log", monkeypatch, least=0.9)


def compare_drafts(
    programs: Path,
    path: Path,
    kind: str,
    head: Path | None,
    log: Path,
    monkeypatch: pytest.MonkeyPatch,
    least: float = 0.97,
) -> None:
    """The same tokens are drafted, right or not."""
    right = theirs(programs, path, kind, head, log, 3, "-lv", "10")
    drafted: list[list[int]] = []
    propose = HeadKind.propose

    def heard(self: HeadKind, asks: Any, chance: Any) -> list[Proposal]:
        found = propose(self, asks, chance)
        drafted.extend(proposal.tokens for proposal in found)
        return found

    monkeypatch.setattr(HeadKind, "propose", heard)
    found = ours(path, kind, head, 3)
    assert [tokens for tokens, _, _ in found] == [tokens for tokens, _, _ in right]
    rounds = list(zip(drafted, drafts_in(log), strict=False))
    same = [a == b for one, other in rounds for a, b in zip(one, other, strict=False)]
    assert len(same) > 200 and sum(same) > least * len(same)


def test_eagle3_where_it_is_right(peer_bin: Path, tmp_path: Path) -> None:
    """Drafts of what was said last, which are right where a text goes round in circles."""
    path = make_target(tmp_path / "t.gguf")
    head = make_eagle(tmp_path / "e.gguf", repeats=True, target_layers=[1, 2, 3])
    assert ours(path, "draft-eagle3", head, 2) == theirs(peer_bin, path, "draft-eagle3", head, tmp_path / "s.log", 2)
