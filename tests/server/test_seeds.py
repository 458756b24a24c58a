"""Seeds: any integer and any text has its own random numbers, only -1 is random, and all are shown as sent."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import orjson
import pytest
from fakes import FakeEngine, post

from llamado.commands.serve import serve_settings
from llamado.engine.request import Defaults, InvalidRequest
from llamado.engine.sampling.params import MAX_SEED
from llamado.engine.sampling.rng import seed_key, uniform
from llamado.flags import FlagParser, add_flags, parse
from llamado.http.json_body import parse_json
from llamado.server.errors import ApiError
from llamado.server.generate.generation_settings import generation_settings
from llamado.server.generate.json_values import number_json
from llamado.server.generate.request import GenerationRequest

JOBS = [int(hashlib.sha256(job).hexdigest(), 16) for job in (b"a", b"b", b"c")]
NUMBERS = [
    0, 1, 42, 2**31, 2**32 - 1, 2**32, 2**53 + 1, 2**63, 2**64 - 1, 2**64, 2**64 + 1, -2, -3, -(2**31), -(2**63),
    -(2**63) - 1, -(2**64), 10**400, 10**400 + 1, 10**MAX_SEED - 1, *JOBS,
]  # fmt: skip
TEXTS = ["", "-1", "42", "job 7", "job 8", "\ud800", "é", "x" * MAX_SEED]


def test_each_seed_has_its_own_numbers() -> None:
    keys = [seed_key(seed) for seed in (*NUMBERS, *TEXTS)]
    assert len({uniform(key, 0) for key in keys}) == len(NUMBERS) + len(TEXTS)
    assert keys[:5] == NUMBERS[:5]  # seeds of 32 bits are unchanged
    assert all(0 <= key < 2**64 for key in keys)
    # Fixed forever: the same seed gives the same answer in later versions.
    assert (seed_key("job 7"), seed_key(2**64)) == (0xE201FEF9F8629550, 0xD41F2FD3C22F298B)


def test_too_long_seeds() -> None:
    for seed in (10**MAX_SEED, -(10**MAX_SEED), "x" * (MAX_SEED + 1)):
        with pytest.raises(InvalidRequest, match=f"seed .*{MAX_SEED}"):
            Defaults().request([1], seed=seed)
    for digits in (MAX_SEED + 1, 5000, 100_000):
        with pytest.raises(ApiError, match=f"'seed': more than {MAX_SEED} digits"):
            parse_json(b'{"seed": ' + b"9" * digits + b"}")


@pytest.mark.parametrize("number", NUMBERS)
def test_an_integer_of_any_size_is_read_and_written(number: int) -> None:
    for written in ('{"a": "\\"seed\\": 99999999999999999999", "seed": %d}', '{"seed" :\n %d ,"seeds":{"seed":%d}}'):
        body = (written.replace("%d", str(number))).encode()
        assert parse_json(body)["seed"] == number
    assert json.loads(orjson.dumps({"seed": number_json(number)})) == {"seed": number}


def test_only_the_seed_of_the_body_is_read_as_a_large_integer() -> None:
    big = 10**30
    assert parse_json(b'{"tools": {"seed": %d}}' % big) == {"tools": {"seed": float(big)}}
    assert parse_json(b'{"tools": {"seed": %d}, "seed": 5}' % big)["seed"] == 5
    assert parse_json(b'{"tools": {"seed": %d}, "seed": 1e30}' % big)["seed"] == 1e30
    assert parse_json(b'{"seed": 1, "seed": %d}' % big)["seed"] == big
    assert parse_json(b'["seed", %d]' % big) == ["seed", float(big)]
    with pytest.raises(ApiError, match="parse error"):
        parse_json(b'{"seed": 00000000000000000000001}')


def _shown(engine: FakeEngine) -> dict[str, Any]:
    """Return the parameters of the last request in the form of `/slots`."""
    request = engine.requests[-1]
    assert isinstance(request.tag, GenerationRequest)
    return generation_settings(request.tag, seed=request.params.sampling.seed, brief=True)


@pytest.mark.parametrize("seed", [*NUMBERS, *(text for text in TEXTS if text != "\ud800")])
@pytest.mark.parametrize("stream", [False, True])
def test_answers_show_the_seed_as_sent(seed: int | str, stream: bool) -> None:
    engine = FakeEngine()
    fields = {"prompt": "a", "n_predict": 1, "seed": seed, "stream": stream}
    status, answer = post("/completion", json.dumps(fields).encode(), engine)
    assert status == 200 and engine.requests[-1].params.sampling.seed == seed
    if stream:
        answer = json.loads(answer.strip().rpartition("data: ")[2])
    assert answer["generation_settings"]["seed"] == seed
    assert json.loads(orjson.dumps(_shown(engine)))["seed"] == seed


def test_seeds_of_further_answers_are_never_random() -> None:
    for first, more in ((7, [8, 9]), (-2, [-3, -4]), (2**64 - 1, [2**64, 2**64 + 1]), ("a", ["a+1", "a+2"])):
        fields = {"prompt": "a", "n_predict": 1, "n_cmpl": 3, "seed": first}
        _, body = post("/completion", json.dumps(fields).encode(), FakeEngine())
        assert [answer["generation_settings"]["seed"] for answer in body] == [first, *more]


def test_minus_one_and_no_seed_are_random() -> None:
    for fields in ({}, {"seed": None}, {"seed": -1}):
        engine = FakeEngine()
        post("/completion", {"prompt": "a", "n_predict": 1, **fields}, engine)
        assert engine.requests[-1].params.sampling.seed in (None, -1)
        assert _shown(engine)["seed"] == 2**32 - 1


@pytest.mark.parametrize(
    ("given", "seed"), [("7", 7), ("-1", None), ("-2", -2), (str(JOBS[0]), JOBS[0]), ("job", "job")]
)
def test_the_flag(given: str, seed: int | str | None) -> None:
    parser = FlagParser()
    add_flags(parser, "serve")
    settings = serve_settings(parse(parser, "serve", ["-m", "x.gguf", "--seed", given], {})[0])
    assert settings.defaults.sampling.seed == seed
