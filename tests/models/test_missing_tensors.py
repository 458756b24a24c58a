"""Files without one of their tensors: they are refused by name, or the model does without."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
from headed_models import make_headed
from tiers import chosen, first_of
from tiny import TINY, make

from llamado.gguf.reader import GGUFFile
from llamado.models import BatchShape, InvalidModel, Output, UnsupportedModel, load_model
from llamado.models.base import Model
from llamado.models.heads.next_token import HEADS, load_next_token_head
from llamado.models.memory import MemoryOptions

PLAIN = [name for name, tiny in TINY.items() if not tiny.variant]


@pytest.mark.slow
@pytest.mark.parametrize("where", first_of(["in all layers", "in the last layer"]))
@pytest.mark.parametrize("name", chosen(TINY, PLAIN))
def test_each_tensor_is_required_by_name_or_optional(name: str, where: str, tmp_path: Path) -> None:
    with GGUFFile.open(make(TINY[name], tmp_path / "m.gguf")) as file:
        roles: dict[str, list[str]] = {}
        for tensor in file.tensors:
            roles.setdefault(re.sub(r"\.\d+\.", ".N.", tensor, count=1), []).append(tensor)
        missing = [names if where == "in all layers" else names[-1:] for names in roles.values()]
        assert n_refused(file, build, missing) > 4  # the last layer may be that of a head


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_each_tensor_of_a_head_is_required_by_name_or_optional(name: str, tmp_path: Path) -> None:
    with GGUFFile.open(make_headed(tmp_path / "m.gguf", name)) as file:
        assert n_refused(file, build_head, [(tensor,) for tensor in file.tensors]) > 5


@pytest.mark.parametrize("name", ["glm4moe", "nemotron_h_moe"])
def test_a_head_may_have_embedding_norm_and_output_of_its_own(name: str, tmp_path: Path) -> None:
    """Otherwise it uses the model's."""
    with GGUFFile.open(make_headed(tmp_path / "m.gguf", name)) as file:
        (start,) = {tensor.partition("nextn")[0] for tensor in file.tensors if "nextn.eh_proj" in tensor}
        shared = {"embed_tokens": "token_embd", "shared_head_norm": "output_norm", "shared_head_head": "output"}
        own = {f"{start}nextn.{ours}.weight": file.tensors[f"{theirs}.weight"] for ours, theirs in shared.items()}
        rest = {tensor: info for tensor, info in file.tensors.items() if tensor not in own}
        for names in itertools.chain.from_iterable(itertools.combinations(own, n) for n in range(4)):
            file.tensors = {**rest, **{tensor: own[tensor] for tensor in names}}
            weights = build_head(file).weights
            for tensor, theirs in zip(own, shared.values(), strict=True):
                assert (tensor in weights) == (tensor in names)
                assert tensor in names or f"{theirs}.weight" in weights


def build(file: GGUFFile) -> Model:
    """Load the model and build a graph."""
    model = load_model(file)
    output = Output.LOGITS if model.generates else Output.HIDDEN
    model.build(BatchShape(2, 1, 256, output), model.memory(MemoryOptions(n_cells=256)))
    return model


def build_head(file: GGUFFile) -> Model:
    """Load the head and build a graph."""
    head = load_next_token_head(file)
    shape = BatchShape(2, 1, 256, hidden_width=head.hidden_widths[0])
    head.build(shape, head.memory(MemoryOptions(n_cells=256)))
    return head


def n_refused(file: GGUFFile, build: Callable[[GGUFFile], Model], missing: Iterable[Sequence[str]]) -> int:
    """Return how many files without some tensors are refused. The others must be usable."""
    build(file)
    whole, refused = dict(file.tensors), 0
    for some in missing:
        file.tensors = {tensor: info for tensor, info in whole.items() if tensor not in some}
        try:
            build(file)
        except (InvalidModel, UnsupportedModel) as error:
            assert file.source in str(error), error
            refused += 1
        except Exception as error:
            pytest.fail(f"without {some}: {type(error).__name__}: {error}")
    return refused
