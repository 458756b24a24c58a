"""DFlash draft heads: their formula, and answers that do not depend on them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from headed_models import make_dflash, make_eagle, make_target
from tiers import first_of

from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import DraftOptions, EngineOptions, ModelSource
from llamado.models import InvalidModel, UnsupportedModel
from llamado.models.memory import Span

from .test_drafting_eagle3 import Array, norm, weights
from .test_drafting_heads import answers, load, outputs, work

HEAD = 32


def rotated(x: Array, positions: Any, factors: Array) -> Array:
    """Rotate heads [n, heads, dim]: pairs are split between both halves (NEOX). `factors` divide the frequencies."""
    half = HEAD // 2
    angles = positions[:, None, None] * 10000.0 ** (-np.arange(half) / half) / factors
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def dflash(w: dict[str, Array], embedding: Array, features: Array, tokens: list[int], *, causal: bool) -> Array:
    """Return the logits of all positions of a block after a context, by the published formula."""
    context = norm(features @ w["fc.weight"].T, w["enc.output_norm.weight"])
    n, m = len(context), len(tokens)
    x = embedding[tokens]
    factors = w.get("rope_freqs.weight", np.ones(HEAD // 2))

    def heads(layer: int, y: Array, name: str) -> Array:
        return (y @ w[f"blk.{layer}.attn_{name}.weight"].T).reshape(len(y), -1, HEAD)

    for layer in range(2):
        block = f"blk.{layer}."
        h = norm(x, w[block + "attn_norm.weight"])
        seen = np.concatenate([context, h])
        k = rotated(norm(heads(layer, seen, "k"), w[block + "attn_k_norm.weight"]), np.arange(n + m), factors)
        shared = block + "attn_v.weight" not in w
        v = norm(heads(layer, seen, "k"), np.ones(HEAD)) if shared else heads(layer, seen, "v")
        q = rotated(norm(heads(layer, h, "q"), w[block + "attn_q_norm.weight"]), np.arange(n, n + m), factors)
        scores = np.einsum("ihd,jhd->hij", q, np.repeat(k, 2, axis=1)) / np.sqrt(HEAD)
        if causal:
            scores[:, :, n:][:, np.triu(np.ones((m, m), bool), 1)] = -np.inf
        most = scores.max(axis=-1, keepdims=True)
        shares = np.exp(scores - most)
        sinks = w.get(block + "attn_sinks.weight")
        total = shares.sum(axis=-1, keepdims=True)
        shares /= total if sinks is None else total + np.exp(sinks.reshape(-1, 1, 1) - most)
        h = np.einsum("hij,jhd->ihd", shares, np.repeat(v, 2, axis=1)).reshape(m, -1)
        h = h @ w[block + "attn_output.weight"].T
        if block + "post_attention_norm.weight" in w:
            h = norm(h, w[block + "post_attention_norm.weight"])
        x = x + h
        h = norm(x, w[block + "ffn_norm.weight"])
        gate = h @ w[block + "ffn_gate.weight"].T
        h = (gate / (1 + np.exp(-gate)) * (h @ w[block + "ffn_up.weight"].T)) @ w[block + "ffn_down.weight"].T
        if block + "post_ffw_norm.weight" in w:
            h = norm(h, w[block + "post_ffw_norm.weight"])
        x = (x + h) * w.get(block + "layer_output_scale.weight", np.ones(1))
    return norm(x, w["output_norm.weight"]) @ w["output.weight"].T


ALL = ("post_attention_norm.weight", "post_ffw_norm.weight", "attn_sinks.weight", "layer_output_scale.weight")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    first_of(
        [
            {"more": ALL, "own": True},
            {"more": ("-attn_v.weight",)},
            {"more": ("rope_freqs.weight",)},
            {"attention.causal": True},
            {},
        ],
        4,
    ),
)
def test_dflash_computes_the_published_formula(options: dict[str, Any], tmp_path: Path) -> None:
    target = make_target(tmp_path / "t.gguf")
    path = make_dflash(tmp_path / "d.gguf", n_drafted=100, **options)
    w = weights(path)
    embedding = w.get("token_embd.weight", weights(target)["token_embd.weight"])
    features = np.random.default_rng(2).standard_normal((9, 384)).astype(np.float32)
    block = [300, 5, 5, 5]
    right = dflash(w, embedding, features.astype(np.float64), block, causal="attention.causal" in options)
    with load(target, "draft-dflash", path, type_k="f32") as model:
        assert model.draft is not None
        runner = model.draft.runner
        handle = runner.memory.allocate(32)
        assert handle is not None
        nothing = np.empty(0, np.int32)
        for at, n in ((0, 5), (5, 4)):  # in two parts
            given = features[at : at + n]
            runner.start(np.zeros(n, np.int32), [Span(handle, at, n)], nothing, given=given).result()
            handle.used = at + n
        for _ in range(2):  # a block leaves no cells
            rows = runner.start(np.array(block, np.int32), [Span(handle, 9, 4)], np.arange(4, dtype=np.int32)).result()
    assert np.abs(rows - right).max() < 2e-2 * np.abs(right).max()


@pytest.mark.slow
@pytest.mark.parametrize("disturbed", first_of([True, False]))
def test_answers_are_the_same_with_and_without_dflash(tmp_path: Path, disturbed: bool) -> None:
    target = make_target(tmp_path / "t.gguf")
    options = {"n_slots": 3, "n_batch": 24, "n_ctx": 768, "cache_ram": 16}
    with load(target, None, **options) as model:
        plain = work(model, disturbed=False)
        expected = outputs(answers(model, 12))
    often = Counter(token for answer in plain for token in answer[0])
    table = tuple(sorted(token for token, _ in often.most_common(8)))
    path = make_dflash(tmp_path / "d.gguf", table=table)
    with load(target, "draft-dflash", path, **options) as model:
        assert work(model, disturbed=disturbed) == plain
        assert outputs(answers(model, 12)) == expected
        (counts,) = model.engine.snapshot().counters.drafts
        assert counts.name == "draft-dflash" and counts.n_drafted > 150 and counts.n_accepted > 0


@pytest.mark.slow
def test_dflash_files_are_recognized(tmp_path: Path) -> None:
    target, path = make_target(tmp_path / "t.gguf"), make_dflash(tmp_path / "d.gguf")
    drafts = DraftOptions(model=ModelSource(spec=str(path)))
    with LoadedModel.load(target, EngineOptions(n_ctx=256, n_threads=1, drafts=drafts)) as model:
        assert [count.name for count in model.engine.snapshot().counters.drafts] == ["suffix", "draft-dflash"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attention.sliding_window": 64}, "DFlash heads with sliding windows are not supported"),
        ({"hyper_connection.count": 4}, "DFlash heads with hyper-connections"),
        ({"hidden_activation": "relu"}, "'relu'; silu, gelu"),
        ({"tokenizer.ggml.mask_token_id": 512}, "is 512 of 512 tokens"),
        ({"target_layers": [0, 1, 5]}, r"reads layers \[0, 1, 5\]; the model has 4 layers"),
    ],
)
def test_unsupported_dflash_files_are_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    target, path = make_target(tmp_path / "t.gguf"), make_dflash(tmp_path / "d.gguf", **keys)
    with pytest.raises((UnsupportedModel, InvalidModel), match=message):
        load(target, "draft-dflash", path)


def test_head_of_another_kind_is_refused(tmp_path: Path) -> None:
    target, eagle = make_target(tmp_path / "t.gguf"), make_eagle(tmp_path / "e.gguf")
    with pytest.raises(InvalidModel, match="its architecture is not 'dflash'"):
        load(target, "draft-dflash", eagle)
