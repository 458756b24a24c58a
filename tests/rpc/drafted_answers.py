"""Answers of a model over links, with drafts that are always worth their time."""

from __future__ import annotations

from typing import Any

from llamado.engine.drafts.cost import Cost
from llamado.engine.loaded_model import LoadedModel


class FreeDrafts(Cost):
    """A draft schedule that always drafts."""

    def least_gain(self, n_generating: int, seconds: float = 0.0) -> float:
        return 0.0

    def drafts(self, n_generating: int) -> bool:
        return True


def answers(llama: LoadedModel, n: int = 40) -> list[Any]:
    return [
        llama.complete(prompt, n_predict=n, temperature=t, seed=7, ignore_eos=True, n_probs=1)
        for t, prompt in ((0.0, [1, 2, 3]), (0.8, [5, 9, 17, 4, 8]))
    ]


def told(results: list[Any]) -> list[Any]:
    return [(r.tokens, r.content, r.probs, r.stop_type, r.n_predicted) for r in results]
