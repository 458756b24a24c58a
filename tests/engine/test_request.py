"""Requests made from defaults and given fields."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from llamado.engine.request import Defaults, GenerationParams, InvalidRequest, Request, Timings, TokenProb, TopTokens
from llamado.engine.sampling.params import Sampling


def test_given_fields_override_the_defaults() -> None:
    defaults = Defaults(sampling=Sampling(temperature=0.1, top_k=7), n_predict=33, n_keep=4, stop=("x",))
    request = defaults.request([1, 2], top_k=9, n_predict=-1, stop=["y"], seed=None)
    assert request == Request(
        prompt=[1, 2],
        params=GenerationParams(sampling=Sampling(temperature=0.1, top_k=9), n_predict=33, n_keep=4, stop=["y"]),
    )
    assert defaults.params().stop == ["x"] and defaults.params(n_predict=2).n_predict == 2
    assert defaults.params(samplers="tk").sampling.samplers == ("temperature", "top_k")
    assert defaults.params(samplers=["temp", "top-k"]).sampling.samplers == ("temperature", "top_k")


@pytest.mark.parametrize(
    "bad", [{"prompt_": 1}, {"n_predict": -2}, {"n_probs": -1}, {"temperature": float("nan")}, {"samplers": "q"}]
)
def test_error_names_the_invalid_field(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        Defaults().request([1], **bad)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no tokens"):
        Defaults().request([])


def test_rates_exclude_the_first_token() -> None:
    timings = Timings(cache_n=5, prompt_n=10, prompt_ms=20.0, predicted_n=5, predicted_ms=8.0)
    assert (timings.prompt_per_token_ms, timings.prompt_per_second) == (2.0, 500.0)
    assert (timings.predicted_per_token_ms, timings.predicted_per_second) == (2.0, 500.0)
    assert Timings().predicted_per_second == Timings().prompt_per_second == Timings().predicted_per_token_ms == 0.0


def test_probabilities_are_stored_as_arrays() -> None:
    """A million of them may wait for slow clients: each takes 20 bytes, instead of 300 as an object."""
    many = 20_000
    tracemalloc.start()
    top = TopTokens(((i, 1 / (i + 1), -float(i)) for i in range(many)), lambda token: b"%d" % token)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 30 * many
    assert len(top) == many and top[3] == TokenProb(3, b"3", 0.25, -3.0) and top[-1].id == many - 1
    assert top[1:3] == (TokenProb(1, b"1", 0.5, -1.0), TokenProb(2, b"2", 1 / 3, -2.0))
    assert [one.id for one in top] == list(range(many))
    assert TopTokens([(1, 0.5, -1.0)], bytes) == (TokenProb(1, b"\0", 0.5, -1.0),) != TopTokens([], bytes)
