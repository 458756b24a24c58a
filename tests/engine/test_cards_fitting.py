"""`--fit` with graphics cards: which of context, layers and experts gives way first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from tiny_models import make_llama

from llamado.devices.split.placement import DeviceFigures, NotEnoughMemory, SplitOptions
from llamado.engine.forward.fitting import Fit, MemoryRequest, fit, sizes_for
from llamado.engine.options import FitOptions
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType
from llamado.models import load_model

TRAINED, LEAST, GIB = 65536, 4096, 1 << 30
LOCAL = SplitOptions(gpus=True, joins=False)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GGUFFile]:
    path = make_llama(
        tmp_path_factory.mktemp("fit") / "m.gguf", n_layer=4, n_vocab=320, n_ctx=TRAINED, n_ff=4096, wtype="Q8_0"
    )
    with GGUFFile.open(path) as opened:
        yield opened


def wanted(n_ctx: int = 0, *, on: bool = True, target: int = 0) -> MemoryRequest:
    options = FitOptions(on=on, target=(target,), least_context=LEAST)
    return MemoryRequest(n_ctx, 1, True, 512, TensorType.F16, TensorType.F16, fit=options)


def need(file: GGUFFile, n_ctx: int) -> int:
    """Return the bytes of everything with so many tokens of context."""
    sizes = sizes_for(file, load_model(file), wanted(), n_ctx)
    return sizes.weights + sum(sizes.kv) + sizes.compute + sizes.head_compute


def fitted(file: GGUFFile, free: int, request: MemoryRequest, split: SplitOptions = LOCAL, cpu: int = 100 * GIB) -> Fit:
    figures = [
        DeviceFigures(name="CPU", local=True, free=cpu, total=cpu),
        DeviceFigures(name="CUDA0", local=False, accelerator=True, free=free, total=100 * GIB),
    ]
    return fit(file, load_model(file), request, figures, split)


def layers_of(found: Fit) -> list[int]:
    return [*found.placement.layers, found.placement.head]


def test_everything_fits(file: GGUFFile) -> None:
    found = fitted(file, need(file, TRAINED), wanted())
    assert layers_of(found) == [1] * 5 and found.n_cells == TRAINED and found.notes == ()


def test_an_automatic_context_gives_way_before_layers_do(file: GGUFFile) -> None:
    """The context is reduced to the card's room beside the whole model, as in llama.cpp."""
    free = need(file, 20224)
    found = fitted(file, free, wanted())
    assert layers_of(found) == [1] * 5 and found.n_cells == 20224
    (note,) = found.notes
    assert note.startswith(f"the context is cut from {TRAINED} tokens (the model's own) to {found.n_cells}: ")
    assert "CUDA0 needs" in note


def test_the_least_context_if_the_card_cannot_hold_all_layers(file: GGUFFile) -> None:
    """So that the card has most of them."""
    found = fitted(file, need(file, LEAST) - 1, wanted())
    assert found.n_cells == LEAST and layers_of(found) == [0, 1, 1, 1, 1]
    assert found.notes[0].startswith(f"the context is cut from {TRAINED} tokens (the model's own) to {LEAST}: ")


def test_a_given_context_stays_and_layers_give_way(file: GGUFFile) -> None:
    found = fitted(file, need(file, TRAINED) - 1, wanted(TRAINED))
    assert found.n_cells == TRAINED and layers_of(found) == [0, 1, 1, 1, 1] and found.notes == ()
    assert layers_of(fitted(file, need(file, 8192), wanted(8192))) == [1] * 5


def test_without_fitting_layers_give_way(file: GGUFFile) -> None:
    for request in (wanted(on=False), wanted(TRAINED, on=False)):
        found = fitted(file, need(file, TRAINED) - 1, request)
        assert found.n_cells == TRAINED and layers_of(found) == [0, 1, 1, 1, 1]


def test_memory_that_is_left_to_others(file: GGUFFile) -> None:
    """`--fit-target` counts for cards; a layer stays with the CPU for it."""
    exact = need(file, 8192)
    assert layers_of(fitted(file, exact + GIB, wanted(8192, target=GIB))) == [1] * 5
    assert layers_of(fitted(file, exact + GIB - 1, wanted(8192, target=GIB))) == [0, 1, 1, 1, 1]


def test_a_given_number_of_layers(file: GGUFFile) -> None:
    """The context gives way; if that is not enough, the error names the largest number."""
    all_layers = replace(LOCAL, n_gpu_layers=99)
    found = fitted(file, need(file, 20224), wanted(), all_layers)
    assert layers_of(found) == [1] * 5 and LEAST < found.n_cells < TRAINED
    with pytest.raises(NotEnoughMemory, match=r"CUDA0 needs .*-ngl 4 \(the most that fits\)"):
        fitted(file, need(file, LEAST) - 1, wanted(), all_layers)


def test_weights_that_memory_cannot_hold_are_read_from_the_file(file: GGUFFile) -> None:
    sizes = sizes_for(file, load_model(file), wanted(), LEAST)
    found = fitted(file, need(file, LEAST) - 1, wanted(), cpu=sizes.compute + sizes.kv[0] + 1)
    assert layers_of(found) == [0, 1, 1, 1, 1] and "read from the file again and again" in found.notes[0]
