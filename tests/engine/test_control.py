"""Control vectors: their effect on answers, the layers they apply to, and the checks of their files."""

from __future__ import annotations

from pathlib import Path

import pytest
from control_files import make_control
from lora_files import make_adapter
from tiny_models import make_llama

from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import EngineOptions
from llamado.models import InvalidAdapter, load_control

PROMPT = [*range(3, 60)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("control") / "m.gguf", n_layer=3, n_embd=256)


def answer(model: Path, *control: tuple[Path, float], layers: tuple[int, int] = (0, 0), **options: int) -> object:
    given = tuple((str(path), scale) for path, scale in control)
    loaded = EngineOptions(n_ctx=256, control=given, control_layers=layers, n_threads=1, **options)
    with LoadedModel.load(model, loaded) as llama:
        result = llama.complete(PROMPT, n_predict=8, n_probs=3, temperature=0.0)
        return result.tokens, result.probs, llama.forward.cell_kind(()).model  # type: ignore[attr-defined]


@pytest.mark.slow
def test_control_vectors_change_answers_and_cell_kinds(model: Path, tmp_path: Path) -> None:
    one, two = (make_control(tmp_path / f"{i}.gguf", 256, (1, 2, 3), size=0.5, seed=i) for i in range(2))
    plain, steered = answer(model), answer(model, (one, 1.0))
    assert steered != plain
    assert steered == answer(model, (one, 1.0), n_batch=4, n_ubatch=4) == answer(model, (one, 1.0), layers=(1, 9))
    assert steered == answer(model, (one, 0.5), (one, 0.5))
    found = [plain, steered, answer(model, (one, -1.0)), answer(model, (one, 1.0), (two, 0.5))]
    found += [answer(model, (one, 1.0), layers=layers) for layers in ((1, 1), (2, 2))]
    assert len({str(one) for one in found}) == len({one[2] for one in found}) == 6  # type: ignore[index]


def test_invalid_control_vector_files_are_refused(model: Path, tmp_path: Path) -> None:
    for path, reason in (
        (make_control(tmp_path / "narrow.gguf", 64, (1,)), "directions of this model are F32, 256"),
        (make_control(tmp_path / "first.gguf", 256, (0, 1)), "direction.0' is not part"),
        (make_control(tmp_path / "none.gguf", 256, ()), "no direction"),
        (make_adapter(tmp_path / "lora.gguf", model), "is not part of a control vector"),
    ):
        with pytest.raises(InvalidAdapter, match=reason):
            load_control(256, 3, [(path, 1.0)])
