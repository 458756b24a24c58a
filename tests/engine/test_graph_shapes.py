"""Graph shapes: their sizes for batches, and the order in which they are prepared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from llamado.engine.forward.graphs import Graphs
from llamado.engine.forward.options import RunnerOptions
from llamado.models.batch import BatchShape


class RecordingGraphs(Graphs):
    """Records the shapes that are prepared."""

    def __init__(self, max_batch: int) -> None:
        tensors = cast(Any, SimpleNamespace(placement=None))
        model = cast(Any, SimpleNamespace(adapters=(), hidden_widths=(0,)))
        memory = cast(Any, SimpleNamespace(n_cells=4096, has_states=False))
        super().__init__(tensors, [], model, memory, RunnerOptions(n_cells=4096, max_batch=max_batch))
        self.shapes: list[BatchShape] = []

    def prepare(self, shape: BatchShape) -> None:
        self.shapes.append(shape)

    def all_ahead(self) -> list[BatchShape]:
        return list(iter(self.next_ahead, None))


@pytest.mark.parametrize("n", [1, 3, 8, 9, 11, 13, 16])
def test_small_decode_batches_have_no_padding(n: int) -> None:
    shape = RecordingGraphs(512).shape(n, n, used=100)
    assert (shape.n_tokens, shape.n_outputs) == (n, n)


@pytest.mark.parametrize(("n", "n_out", "found"), [(9, 1, (12, 1)), (13, 4, (16, 4)), (17, 17, (20, 20))])
def test_other_batches_are_padded_to_few_sizes(n: int, n_out: int, found: tuple[int, int]) -> None:
    shape = RecordingGraphs(512).shape(n, n_out, used=100)
    assert (shape.n_tokens, shape.n_outputs) == found


def test_eight_sequences_are_prepared_at_start_and_sixteen_when_idle() -> None:
    graphs = RecordingGraphs(512)
    graphs.warm_up([*range(1, 17), 512], None, ())
    assert [shape.n_tokens for shape in graphs.shapes] == [512, *range(8, 0, -1)]
    ahead = {(shape.n_tokens, shape.n_kv) for shape in graphs.all_ahead() if shape.n_outputs == shape.n_tokens}
    assert {(n, cells) for n in range(9, 17) for cells in (1024, 4096)} <= ahead


def test_largest_batch_is_prepared_first() -> None:
    graphs = RecordingGraphs(12)
    graphs.warm_up([*range(1, 13), 12], None, ())
    assert graphs.shapes[0].n_tokens == 12
