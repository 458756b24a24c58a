"""Every sampler's probabilities against the real llama-server's.

Forward passes of two programs differ a little, more than a wrong formula might. So most comparisons start from the
logits that the real server itself reports (log-probabilities of the whole vocabulary, and the constant they lack from
our forward pass), and hold the outcome to a thousandth. Our own logits then give nearly the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from parity import logits_along
from peer_server import llama_server

from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import EngineOptions
from llamado.engine.sampling.chain import Sampler, SamplerSetup
from llamado.engine.sampling.params import Sampling, sampler_names

pytestmark = pytest.mark.interop

N_SHOWN = 400

PROMPTS = {
    "story": "Once upon a time, in a village by the sea, there lived an old",
    "repeats": "the cat sat on the mat. the dog sat on the mat. the cat sat on the rug. the dog sat on the",
    "list": 'Colours:\n- "red": warm\n- "blue": cold\n- "green": fresh\n- "',
}

OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
DRY: dict[str, Any] = OFF | {"dry_multiplier": 0.8, "top_k": 100}

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "top-k": OFF | {"top_k": 7},
    "top-p": OFF | {"top_p": 0.7},
    "top-p, min_keep": OFF | {"top_p": 0.1, "min_keep": 6},
    "min-p": OFF | {"min_p": 0.08},
    "min-p, min_keep": OFF | {"min_p": 0.9, "min_keep": 5},
    "typical": OFF | {"typical_p": 0.4},
    "typical, min_keep": OFF | {"typical_p": 0.05, "min_keep": 8},
    "temperature": OFF | {"temperature": 1.7},
    "greedy": OFF | {"temperature": 0.0},
    "top-n-sigma": OFF | {"top_n_sigma": 0.9},
    "top-n-sigma of few": {"samplers": ["top_k", "top_n_sigma"], "top_k": 30, "top_n_sigma": 1.1},
    "dynamic temperature": OFF | {"dynatemp_range": 0.6},
    "dynamic temperature, exponent": {"dynatemp_range": 0.7, "dynatemp_exponent": 2.5, "top_k": 20},
    "dynamic temperature counts the masked": {
        "samplers": ["top_n_sigma", "temperature"],
        "top_n_sigma": 1.0,
        "dynatemp_range": 0.6,
    },
    "XTC": OFF | {"xtc_probability": 1.0, "xtc_threshold": 0.05},
    "XTC, min_keep": OFF | {"xtc_probability": 1.0, "xtc_threshold": 0.01, "top_k": 10, "min_keep": 8},
    "repeat penalty": OFF | {"repeat_penalty": 1.4},
    "frequency and presence": OFF | {"frequency_penalty": 0.4, "presence_penalty": 0.7},
    "penalties of the last 5": OFF | {"repeat_penalty": 1.8, "frequency_penalty": 0.3, "repeat_last_n": 5},
    "penalties late and twice": {"samplers": ["top_k", "penalties", "temperature", "penalties"], "repeat_penalty": 1.3},
    "DRY": DRY,
    "DRY, base and length": DRY | {"dry_base": 1.2, "dry_allowed_length": 1, "dry_penalty_last_n": 4096},
    "DRY, every token": DRY | {"dry_allowed_length": 0, "dry_penalty_last_n": 9},
    "DRY, breakers of many tokens": DRY
    | {"dry_allowed_length": 1, "dry_sequence_breakers": ["sat on", '": c', "mat. t"]},
    "DRY, breakers in tokens": DRY | {"dry_allowed_length": 1, "dry_sequence_breakers": ["o", "\n"]},
    "logit bias": {"logit_bias": [[198, 3.0], [28, False], [260, -2.5], [1, 1.5]], "top_k": 60},
    "no end": {"ignore_eos": True, "logit_bias": [[2, 9.0], [339, 8.0]]},
    "another order": {"samplers": ["temperature", "min_p", "top_k", "typ_p", "top_p"], "temperature": 1.5},
    "as letters": {"samplers": "tkkpm", "temperature": 0.6},
    "all together": {
        "repeat_penalty": 1.1,
        "dry_multiplier": 0.5,
        "top_n_sigma": 2.0,
        "top_k": 50,
        "typical_p": 0.9,
        "top_p": 0.9,
        "min_p": 0.01,
        "xtc_probability": 1.0,
        "xtc_threshold": 0.2,
        "temperature": 1.2,
        "dynatemp_range": 0.3,
    },
    "no samplers": {"samplers": []},
    "infill": {"samplers": ["top_k", "infill", "temperature"], "top_k": 40},
    "adaptive-p": {"samplers": ["top_k", "temperature", "adaptive_p"], "top_k": 30, "adaptive_target": 0.25},
    "adaptive-p off": {"samplers": ["top_k", "adaptive_p"], "adaptive_target": -1.0},
    "Mirostat 1": {"mirostat": 1, "mirostat_tau": 4.0},
    "Mirostat 1, temperature": {"mirostat": 1, "temperature": 1.4, "top_k": 2},
    "Mirostat 2": {"mirostat": 2, "mirostat_tau": 2.0},
    "Mirostat 2, temperature": {"mirostat": 2, "temperature": 1.4, "mirostat_tau": 3.0},
}


@dataclass
class Place:
    """A prompt, its logits as the real server computes them, and as we do."""

    tokens: list[int]
    theirs: NDArray[np.float32]
    ours: NDArray[np.float32]


@dataclass
class Setting:
    llama: LoadedModel
    client: httpx.Client

    def ask(self, tokens: list[int], **options: Any) -> list[dict[str, Any]]:
        """Return llama-server's report of each generated token."""
        body = {"prompt": tokens, "n_predict": 1, "seed": 1, "cache_prompt": True} | options
        answer = self.client.post("/completion", json=body)
        assert answer.status_code == 200, answer.text
        reported: list[dict[str, Any]] = answer.json()["completion_probabilities"]
        return reported

    def probabilities(self, tokens: list[int], **options: Any) -> list[tuple[int, dict[int, float]]]:
        """The tokens it generates, and the probabilities of the likeliest after the chain."""
        reported = self.ask(tokens, n_probs=N_SHOWN, post_sampling_probs=True, **options)
        return [(at["id"], {top["id"]: top["prob"] for top in at["top_probs"]}) for at in reported]

    def place(self, tokens: list[int]) -> Place:
        """The real server has the tokens in its cache but for the last: its logits are those of every later request."""
        n_vocab = self.llama.forward.n_vocab
        (at,) = self.ask(tokens, n_probs=n_vocab, temperature=0.0)
        logprobs = np.full(n_vocab, np.nan)
        for top in at["top_logprobs"]:
            logprobs[top["id"]] = top["logprob"]
        assert np.isfinite(logprobs).all()
        (ours,) = logits_along(self.llama.forward, tokens, len(tokens) - 1)
        ours = ours.copy()
        return Place(tokens, (logprobs + np.median(ours - logprobs)).astype(np.float32), ours)

    def sampler(self, options: dict[str, Any], prompt: list[int]) -> Sampler:
        """Ours for the same options."""
        options = dict(options)
        if "samplers" in options:
            options["samplers"] = sampler_names(options["samplers"])
        options["logit_bias"] = {t: -math.inf if b is False else b for t, b in options.get("logit_bias", ())}
        options["dry_sequence_breakers"] = tuple(options.get("dry_sequence_breakers", Sampling().dry_sequence_breakers))
        tokenizer = self.llama.tokenizer
        sampler = Sampler(
            dataclasses.replace(Sampling(), **options),
            SamplerSetup(self.llama.forward.n_vocab, tokenizer.eog, tokenizer),
            seed=1,
        )
        sampler.start(prompt)
        return sampler


@pytest.fixture(scope="module")
def setting(peer_bin: Path, smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    log = tmp_path_factory.mktemp("peer") / "llama-server.log"
    options = ["-np", "1", "-c", "1024", "-t", "1", "-fa", "on", "--no-warmup"]
    with (
        LoadedModel.load(smollm2_path, EngineOptions(n_ctx=512, n_threads=1)) as llama,
        llama_server(peer_bin, smollm2_path, log, *options) as client,
    ):
        llama.engine.close()  # the forward pass is driven from here
        yield Setting(llama, client)


@pytest.fixture(scope="module")
def places(setting: Setting) -> dict[str, Place]:
    found = {}
    for name, text in PROMPTS.items():
        tokens = setting.llama.tokenize(text, add_special=True)
        setting.ask(tokens, n_probs=1)
        found[name] = setting.place(tokens)
    return found


def apart(ours: dict[int, float], theirs: dict[int, float]) -> float:
    """The largest share of probability that two distributions can disagree about."""
    return 0.5 * sum(abs(ours.get(i, 0.0) - theirs.get(i, 0.0)) for i in ours.keys() | theirs.keys())


def chain(sampler: Sampler, row: NDArray[np.float32], position: int = 0) -> dict[int, float]:
    """The probabilities of the likeliest tokens after our chain."""
    token = sampler.sample(row, position)
    return dict(sampler.candidates(N_SHOWN, token)[1])


def test_distributions(setting: Setting, places: dict[str, Place]) -> None:
    wrong, distances, changed = [], [], []
    for prompt, place in places.items():
        # The first request has the cache as `place` had it: everything but the last token.
        setting.ask(place.tokens, n_probs=1)
        plain = chain(setting.sampler(OFF, place.tokens), place.theirs)
        for name, options in SETTINGS.items():
            ((_, theirs),) = setting.probabilities(place.tokens, **options)
            ours = chain(setting.sampler(options, place.tokens), place.theirs)
            distance = apart(ours, theirs)
            if distance > 1e-3 or abs(len(ours) - len(theirs)) > 1:
                wrong.append(f"{prompt}, {name}: {distance:.5f} apart, {len(ours)} tokens here and {len(theirs)} there")
            distances.append(apart(chain(setting.sampler(options, place.tokens), place.ours), theirs))
            changed.append((name, apart(ours, plain)))
    assert not wrong, "\n".join(wrong)
    # Each setting must make a difference somewhere, else nothing was compared.
    idle = {name for name, _ in changed} - {name for name, d in changed if d > 0.01}
    assert idle <= {"no samplers"}
    assert float(np.median(distances)) < 0.06


@pytest.mark.parametrize(
    "options",
    [
        {"mirostat": 1, "mirostat_tau": 3.0, "mirostat_eta": 0.5},
        {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.5},
        {
            "samplers": ["top_k", "temperature", "adaptive_p"],
            "top_k": 50,
            "adaptive_target": 0.2,
            "adaptive_decay": 0.5,
        },
        {"dry_multiplier": 0.8, "dry_allowed_length": 1, "repeat_penalty": 1.2, "temperature": 2.0, "min_p": 0.0},
    ],
    ids=["mirostat 1", "mirostat 2", "adaptive-p", "penalties"],
)
def test_sampler_history(setting: Setting, places: dict[str, Place], options: dict[str, Any]) -> None:
    prompt = places["story"].tokens
    answer = setting.probabilities(prompt, **options, n_predict=3)
    tokens = [token for token, _ in answer]
    # From the longest back: the cache holds just what it held when the token was drawn.
    rows = [setting.place([*prompt, *tokens[:i]]).theirs for i in range(len(tokens) - 1, -1, -1)][::-1]
    sampler = setting.sampler(options, prompt)
    for row, (token, theirs) in zip(rows, answer, strict=True):
        assert apart(chain(sampler, row), theirs) < 2e-3
        # Until accepted, a token can be drawn again: with the random numbers of some place it is theirs.
        assert any(sampler.sample(row, place) == token for place in range(20_000))
        sampler.accept(token)


@pytest.mark.full
def test_how_often_xtc_cuts(setting: Setting, places: dict[str, Place]) -> None:
    """It removes one of two candidates with the given probability."""
    n, probability = 200, 0.3
    options = {"samplers": ["top_k", "xtc"], "top_k": 2, "xtc_probability": probability, "xtc_threshold": 0.0}
    place = places["list"]
    answer = setting.ask(place.tokens, n_predict=n, n_probs=2, post_sampling_probs=True, ignore_eos=True, **options)
    theirs = sum(len(at["top_probs"]) == 1 for at in answer) / len(answer)
    sampler = setting.sampler(options, place.tokens)
    ours = sum(len(chain(sampler, place.theirs, position)) == 1 for position in range(10 * n)) / (10 * n)
    # Four standard errors.
    assert theirs == pytest.approx(probability, abs=4 * math.sqrt(probability * (1 - probability) / len(answer)))
    assert ours == pytest.approx(probability, abs=4 * math.sqrt(probability * (1 - probability) / (10 * n)))
