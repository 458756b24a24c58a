"""EAGLE-3 draft heads: their formula, and answers that do not depend on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from headed_models import make_eagle, make_target
from numpy.typing import NDArray
from tiers import first_of

from llamado.engine.drafts.head import HeadKind
from llamado.engine.loaded_model import LoadedModel
from llamado.models import InvalidModel
from llamado.models.memory import Span

from .test_drafting_heads import PROMPTS, accepted, answers, load, outputs, work

Array = NDArray[np.float64]


def weights(path: Path) -> dict[str, Array]:
    return {t.name: np.array(t.data).reshape(t.shape[::-1]).astype(np.float64) for t in GGUFReader(path).tensors}


def norm(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * weight


def rotated(x: Array, positions: NDArray[Any]) -> Array:
    """Rotate heads [n, heads, dim]: neighboring elements form a pair."""
    dim = x.shape[-1]
    angles = positions[:, None, None] * 10000.0 ** (-np.arange(0, dim, 2) / dim)
    pairs = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
    return np.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape)


def eagle(w: dict[str, Array], embedding: Array, tokens: list[int], states: Array, normed: bool) -> tuple[Array, Array]:
    """Return the logits of all tokens of a sequence and the next states, by the published formula; `states` are fused.

    Each half of the input has its own norm and the residual is added, as in SpecForge and llama.cpp.
    """
    n = len(tokens)
    state = norm(states, w["blk.0.attn_norm_2.weight"])
    x = np.concatenate([norm(embedding[tokens], w["blk.0.attn_norm.weight"]), state], axis=1)
    q, k, v = ((x @ w[f"blk.0.attn_{name}.weight"].T).reshape(n, -1, 32) for name in "qkv")
    q, k = rotated(q, np.arange(n)), rotated(k, np.arange(n))
    k, v = np.repeat(k, 2, axis=1), np.repeat(v, 2, axis=1)
    scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(32)
    scores[:, np.triu(np.ones((n, n), bool), 1)] = -np.inf
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    attended = np.einsum("hij,jhd->ihd", shares, v).reshape(n, -1) @ w["blk.0.attn_output.weight"].T
    y = attended + (state if normed else states)
    h = norm(y, w["blk.0.ffn_norm.weight"])
    gate = h @ w["blk.0.ffn_gate.weight"].T
    y = y + (gate / (1 + np.exp(-gate)) * (h @ w["blk.0.ffn_up.weight"].T)) @ w["blk.0.ffn_down.weight"].T
    return norm(y, w["output_norm.weight"]) @ w["output.weight"].T, y


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"norm_before_residual": True, "norm_before_fc": True}, {"own": True}])
def test_eagle3_computes_the_published_formula(options: dict[str, Any], tmp_path: Path) -> None:
    target = make_target(tmp_path / "t.gguf")
    path = make_eagle(tmp_path / "e.gguf", n_drafted=100, **options)
    random = np.random.default_rng(2)
    tokens, features = [7, 300, 12, 12, 450], random.standard_normal((5, 384)).astype(np.float32)
    w, of_target = weights(path), weights(target)
    embedding = w.get("token_embd.weight", of_target["token_embd.weight"])
    fused = features.astype(np.float64)
    if options.get("norm_before_fc"):
        fused = norm(fused, w["enc.output_norm.weight"])
    states = fused @ w["fc.weight"].T
    right, after = eagle(w, embedding, tokens[:4], states[:4], "norm_before_residual" in options)
    both = np.concatenate([states[:4], after[3:]])  # the last token uses the state the head itself produced
    right_next = eagle(w, embedding, tokens, both, "norm_before_residual" in options)[0][4]
    with load(target, "draft-eagle3", path, type_k="f32") as model:
        assert model.draft is not None
        runner = model.draft.runner
        handle = runner.memory.allocate(16)
        assert handle is not None
        own = np.empty((4, 128), np.float32)
        wanted = np.arange(4, dtype=np.int32)
        start = runner.start(
            np.array(tokens[:4], np.int32), [Span(handle, 0, 4)], wanted, features=own, given=features[:4]
        )
        rows = start.result().copy()
        handle.used = 4
        one = np.array([4], np.int32) - 4
        next_ = runner.start(np.array(tokens[4:], np.int32), [Span(handle, 4, 1)], one, given=own[3:]).result()
    assert np.abs(rows - right).max() < 2e-2 * np.abs(right).max()
    assert np.abs(own - after).max() < 2e-2 * np.abs(after).max()
    assert np.abs(next_[0] - right_next).max() < 2e-2 * np.abs(right_next).max()


@pytest.mark.slow
def test_head_gets_the_hidden_state_of_the_previous_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that copies the last of the three states drafts the token it predicted: the last one."""
    target = make_target(tmp_path / "t.gguf")
    path = make_eagle(tmp_path / "e.gguf", repeats=True, target_layers=[0, 2, 4])
    drafted: list[tuple[int, list[int]]] = []
    propose = HeadKind.propose

    def recording_propose(self: HeadKind, asks: Any, chance: Any) -> Any:
        found = propose(self, asks, chance)
        drafted.extend((ask.history[-1], proposal.tokens) for ask, proposal in zip(asks, found, strict=True))
        return found

    monkeypatch.setattr(HeadKind, "propose", recording_propose)
    with load(target, "draft-eagle3", path) as model:
        for prompt in PROMPTS:
            model.complete(prompt, n_predict=24, temperature=0.0, ignore_eos=True)
    assert len(drafted) > 30 and all(tokens == [last] * len(tokens) and tokens for last, tokens in drafted)


@pytest.mark.slow
@pytest.mark.parametrize("disturbed", first_of([True, False]))
def test_answers_are_the_same_with_and_without_eagle3(tmp_path: Path, disturbed: bool) -> None:
    target = make_target(tmp_path / "t.gguf")
    path = make_eagle(tmp_path / "e.gguf", n_drafted=40)
    options = {"n_slots": 3, "n_batch": 24, "n_ctx": 768, "cache_ram": 16}
    with load(target, None, **options) as model:
        plain = work(model, disturbed=False)
        expected = outputs(answers(model, 12))
    with load(target, "draft-eagle3", path, **options) as model:
        assert work(model, disturbed=disturbed) == plain
        found = answers(model, 12)
        assert outputs(found) == expected
        assert accepted(found) >= 0
        counts = model.engine.snapshot().counters.drafts
        assert [count.name for count in counts] == ["draft-eagle3"] and counts[0].n_drafted > 100


@pytest.mark.slow
def test_eagle3_files_are_recognized(tmp_path: Path) -> None:
    from llamado.engine.options import DraftOptions, EngineOptions, ModelSource

    target, path = make_target(tmp_path / "t.gguf"), make_eagle(tmp_path / "e.gguf")
    drafts = DraftOptions(model=ModelSource(spec=str(path)))
    with LoadedModel.load(target, EngineOptions(n_ctx=256, n_threads=1, drafts=drafts)) as model:
        assert [count.name for count in model.engine.snapshot().counters.drafts] == ["suffix", "draft-eagle3"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"target_hidden_size": 64}, "width 64|fc.weight"),
        ({"target_layers": [0, 1, 5]}, r"reads layers \[0, 1, 5\]; the model has 4 layers"),
        ({"target_layers": [0, 1]}, "target_layers"),
    ],
)
def test_eagle3_head_of_another_shape_is_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    target, path = make_target(tmp_path / "t.gguf"), make_eagle(tmp_path / "e.gguf", **keys)
    with pytest.raises(Exception, match=message):
        load(target, "draft-eagle3", path)
    with pytest.raises(InvalidModel, match="its architecture is not 'eagle3'"):
        load(target, "draft-eagle3", target)
