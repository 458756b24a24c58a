"""Distance of our distributions from llama.cpp's, teacher-forced along llama.cpp's answers.

The real server continues a prompt greedily and reports the ten likeliest tokens of each step. We evaluate the prompt
and its continuation in one go and compare, at every generated position, our distribution with the reported one. So a
disagreement at one position does not carry over to the next.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from llamado.engine.forward.contract import Forward
from llamado.models.memory import Span
from llamado.text.tokenizer.tokenizer import Tokenizer

N_PREDICT = 64
N_TOP = 10
# Requests the real server answers at a time.
N_SLOTS = 8
# Two log-probabilities closer than this are as good as equal; who comes first is chance. (Counted as disagreement.)
TIE = 1e-3


@dataclass(frozen=True)
class Step:
    """One generated position: its token and the likeliest tokens there, best first, with log-probabilities.

    No tokens where the server reports none: it leaves out a token after which the text ends within a character.
    """

    token: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Comparison:
    """Sums over positions."""

    positions: int = 0
    agreed: int = 0
    ties: int = 0
    differences: list[float] = field(default_factory=list)
    disagreements: list[str] = field(default_factory=list)

    @property
    def mean_difference(self) -> float:
        """Mean absolute difference of the log-probabilities of the tokens the server reports."""
        return float(np.mean(self.differences))

    @property
    def agreement(self) -> float:
        """Share of positions where both have the same likeliest token."""
        return self.agreed / self.positions

    def add(self, where: str, step: Step, logprobs: NDArray[np.float64]) -> None:
        """Counts one position; `logprobs` is our whole distribution, f64[n_vocab]."""
        best, ours = step.top[0][0], int(logprobs.argmax())
        self.positions += 1
        self.agreed += ours == best
        self.differences += [abs(p - float(logprobs[token])) for token, p in step.top if logprobs[token] > -np.inf]
        if ours != best:
            theirs = dict(step.top)
            lead = theirs[best] - theirs.get(ours, -np.inf)
            self.ties += lead < TIE or float(logprobs[ours] - logprobs[best]) < TIE
            self.disagreements.append(
                f"{where}: {best} there, {ours} here; it leads by {lead:.4f} there and by "
                f"{logprobs[best] - logprobs[ours]:.4f} here"
            )

    def row(self, name: str) -> str:
        """One line of the table `HEADER` begins."""
        d = np.array(self.differences)
        return (
            f"| {name} | {self.positions} | {100 * self.agreement:.2f}% | {self.ties} | {d.mean():.4f} | "
            f"{np.percentile(d, 95):.4f} | {d.max():.4f} |"
        )


HEADER = """| model | positions | arg-max agrees | ties among the rest | mean abs. difference | 95% | max |
|---|---:|---:|---:|---:|---:|---:|"""


def continuation(client: httpx.Client, tokenizer: Tokenizer, prompt: list[int], **options: Any) -> list[Step]:
    """Return llama-server's greedy answer to `prompt`; shorter if the model ends its answer.

    `options` go into the request.
    """
    body: dict[str, Any] = {"prompt": prompt, "n_predict": N_PREDICT, "n_probs": N_TOP, "temperature": 0}
    body |= {"cache_prompt": False, "return_tokens": True, **options}
    answer = client.post("/completion", json=body).raise_for_status().json()
    reports = iter(answer["completion_probabilities"])
    steps = []
    text = b""
    for token in answer["tokens"]:
        text += tokenizer.piece(token)
        if ends_within_character(text):
            steps.append(Step(token))
            continue
        report = next(reports)
        assert report["id"] == token
        steps.append(Step(token, tuple((top["id"], top["logprob"]) for top in report["top_logprobs"])))
    for report in reports:  # the token that ended the answer, which is no part of it
        steps.append(Step(report["id"], tuple((top["id"], top["logprob"]) for top in report["top_logprobs"])))
    return steps


def continuations(client: httpx.Client, tokenizer: Tokenizer, prompts: list[list[int]]) -> list[list[Step]]:
    """Continuations of several prompts, N_SLOTS at a time."""
    with ThreadPoolExecutor(N_SLOTS) as threads:
        return list(threads.map(lambda prompt: continuation(client, tokenizer, prompt), prompts))


def reported_again(
    client: httpx.Client, prompt: list[int], steps: list[Step], vocabulary: int
) -> Iterable[tuple[Step, NDArray[np.float64]]]:
    """Return the reports of a llama-server at the positions of `steps` when it is forced along them.

    Distributions are f64[vocabulary] with −inf where a token is not among the 100 likeliest.
    """
    tokens = list(prompt)
    for step in steps:
        if step.top:
            # A token that ends the text or a half character would come without a report; the bias makes it another one
            # and leaves the reported distribution alone.
            body: dict[str, Any] = {"prompt": tokens, "n_predict": 1, "n_probs": 100, "logit_bias": [[100, 1000.0]]}
            answer = client.post("/completion", json={**body, "cache_prompt": True}).raise_for_status().json()
            logprobs = np.full(vocabulary, -np.inf)
            for top in answer["completion_probabilities"][0]["top_logprobs"]:
                logprobs[top["id"]] = top["logprob"]
            yield step, logprobs
        tokens.append(step.token)


def ends_within_character(text: bytes) -> bool:
    """Return True if the last bytes are an incomplete UTF-8 character."""
    for length in range(1, min(4, len(text)) + 1):
        byte = text[-length]
        if byte >= 0xC0:
            return length < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
        if byte < 0x80:
            return False
    return False


def logits_along(forward: Forward, tokens: list[int], first: int) -> Iterable[NDArray[np.float32]]:
    """Our logits after each of tokens[first:], the whole evaluated as one prompt in batches."""
    handle = forward.memory.allocate(len(tokens))
    assert handle is not None
    for at in range(0, len(tokens), forward.max_batch):
        batch = np.array(tokens[at : at + forward.max_batch], np.int32)
        positions = np.arange(at, at + len(batch), dtype=np.int32)
        rows = np.nonzero(positions >= first)[0].astype(np.int32)
        yield from forward.start(batch, [Span(handle, at, len(batch), before=tokens[:at])], rows).result()
        handle.used += len(batch)
    forward.memory.free(handle)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-probabilities of one row of logits."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    wide -= np.log(np.exp(wide).sum())
    return wide


def compare(comparison: Comparison, name: str, forward: Forward, prompt: list[int], steps: list[Step]) -> None:
    """Adds one text's generated positions to `comparison`."""
    tokens = prompt + [step.token for step in steps[:-1]]
    rows = logits_along(forward, tokens, len(prompt) - 1)
    for i, (step, row) in enumerate(zip(steps, rows, strict=True)):
        if step.top:
            comparison.add(f"{name}+{i}", step, log_softmax(row))
