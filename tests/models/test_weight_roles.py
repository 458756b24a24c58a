"""Roles of weights, given by architectures when they take a tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
from minilm import make_bert
from tiny_models import make_gemma3, make_llama

from llamado.ggml.role import ModelPart, Role
from llamado.gguf.reader import GGUFFile
from llamado.models import InvalidModel, Model, load_model
from llamado.models.weights import Weights

INPUT, LAYER, OUTPUT, SHARED = ModelPart.INPUT, ModelPart.LAYER, ModelPart.OUTPUT, ModelPart.SHARED


def load(path: Path) -> Model:
    with GGUFFile.open(path) as file:
        return load_model(file)


@pytest.mark.parametrize("make", [make_llama, make_gemma3, make_bert])
def test_every_weight_has_a_role(tmp_path: Path, make: object) -> None:
    assert callable(make)
    model = load(make(tmp_path / "m.gguf", n_layer=3))
    assert model.roles.keys() == model.weights.keys()
    for name, roles in model.roles.items():
        layers = [role.layer for role in roles if role.part is LAYER]
        assert layers == ([int(name.split(".")[1])] if name.startswith("blk.") else [])
        assert all((role.experts, role.used) == (1, 1) for role in roles)


def parts_outside_layers(model: Model) -> dict[str, list[ModelPart]]:
    parts = {name: [role.part for role in roles] for name, roles in model.roles.items()}
    return {name: found for name, found in parts.items() if found != [LAYER]}


def test_parts_outside_the_layers(tmp_path: Path) -> None:
    assert parts_outside_layers(load(make_llama(tmp_path / "m.gguf", freq_factors=True))) == {
        "token_embd.weight": [INPUT],
        "output_norm.weight": [OUTPUT],
        "output.weight": [OUTPUT],
        "rope_freqs.weight": [SHARED],
    }
    assert parts_outside_layers(load(make_bert(tmp_path / "b.gguf", classifier=True, n_scores=2))) == {
        "token_embd.weight": [INPUT],
        "position_embd.weight": [INPUT],
        "token_types.weight": [INPUT],
        "token_embd_norm.weight": [INPUT],
        "token_embd_norm.bias": [INPUT],
        "cls.weight": [OUTPUT],
        "cls.bias": [OUTPUT],
        "cls.output.weight": [OUTPUT],
        "cls.output.bias": [OUTPUT],
    }


@pytest.mark.parametrize("make", [make_llama, make_gemma3])
def test_a_tied_embedding_has_two_roles(tmp_path: Path, make: object) -> None:
    """The second role has the name of the output matrix, which users' patterns refer to."""
    assert callable(make)
    options = {"tied": True} if make is make_llama else {}
    model = load(make(tmp_path / "m.gguf", **options))
    assert "output.weight" not in model.weights
    assert model.roles["token_embd.weight"] == (Role(INPUT, "token_embd.weight"), Role(OUTPUT, "output.weight"))


def test_roles_have_the_number_of_experts(tmp_path: Path) -> None:
    with GGUFFile.open(make_llama(tmp_path / "m.gguf", n_embd=128, n_ff=256)) as file:
        weights = Weights(file)
        up = weights.layer(1).experts(8, 2).require("ffn_up.weight", 128, 256)
        assert weights.taken == {"blk.1.ffn_up.weight": up}
        assert weights.roles[up.name] == (Role(LAYER, up.name, 1, experts=8, used=2),)
        # Taking it again in the same role adds none.
        assert weights.layer(1).experts(8, 2).require("ffn_up.weight", 128, 256) is up
        assert len(weights.roles[up.name]) == 1
        with pytest.raises(InvalidModel, match=r"tensor 'blk\.1\.ffn_up_exps\.weight' is missing"):
            weights.layer(1).experts(8, 2).require("ffn_up_exps.weight", 128, 256, 8)
        with pytest.raises(InvalidModel, match=r"'blk\.0\.ffn_up\.weight' has shape \[128, 256\]; expected \[1, 2\]"):
            weights.layer(0).require("ffn_up.weight", 1, 2)
