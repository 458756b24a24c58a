"""`llamado verify`: check that servers under load give the same answers to the same prompts and seeds, byte by byte."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from llamado.client import AsyncLlamaServerClient, RequestFailed, seed_of
from llamado.commands.options import read_file
from llamado.errors import LlamadoError
from llamado.flags import FlagError, ParsedFlags
from llamado.terminal.text import print

TOP = 5
"""Most likely tokens shown for both servers where their answers diverge."""
MAX_EXPLAINED = 8
"""Differences that are examined; further ones are only counted."""
_TOPICS = (
    "the sea", "a bicycle", "prime numbers", "the moon", "bread", "a railway station", "winter", "glass", "a violin",
    "photosynthesis", "the year 1848", "chess",
)  # fmt: skip
_FORMS = (
    "Write a short story about {}.\n\n",
    "A list of ten facts about {}:\n1.",
    "Question: what should everybody know about {}?\nAnswer:",
    "def describe():\n    # prints a description of {}\n",
    "Dear editor, your last article on {} made me wonder",
)


class CompareError(LlamadoError):
    """A server returned no answer to compare."""


@dataclass(frozen=True)
class VerifyRequest:
    """A prompt and its parameters, sent to all servers."""

    number: int
    prompt: str
    n_predict: int
    temperature: float

    @property
    def seed(self) -> int:
        return seed_of(f"verify-{self.number}")

    @property
    def options(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "n_predict": self.n_predict,
            "temperature": self.temperature,
            "return_tokens": True,
            "receipt": True,
        }


@dataclass(frozen=True)
class ServerAnswer:
    """Answer of a server."""

    content: str
    tokens: tuple[int, ...]
    stop: str


@dataclass
class ComparedServer:
    """One of the servers: its client, its answer to each prompt, and its receipt."""

    client: AsyncLlamaServerClient
    answers: list[ServerAnswer] = field(default_factory=list)
    receipt: dict[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.client.base_url

    async def ask(self, request: VerifyRequest) -> ServerAnswer:
        """Send a request. Raises RequestFailed and ServerUnavailable."""
        response = await self.client.completion(request.prompt, **request.options)
        if not self.receipt:
            self.receipt = response.get("llamado_receipt") or await self._facts(response)
        content, stop = str(response.get("content")), str(response.get("stop_type"))
        return ServerAnswer(content, tuple(response.get("tokens") or ()), stop)

    async def _facts(self, response: dict[str, Any]) -> dict[str, Any]:
        """Return a substitute for the receipt of a server that has none."""
        props = await self.client.props()
        return {
            "build": props.get("build_info"),
            "model": response.get("model"),
            "path": props.get("model_path"),
            "settings": response.get("generation_settings"),
        }

    async def top(self, request: VerifyRequest, before: Sequence[int]) -> list[dict[str, Any]]:
        """Return the most likely tokens after prompt and `before`. Raises RequestFailed and ServerUnavailable."""
        prompt = await self.client.tokenize(request.prompt, add_special=True)
        response = await self.client.completion([*prompt, *before], n_predict=1, n_probs=TOP, temperature=0.0)
        places = response.get("completion_probabilities") or [{}]
        result = places[0].get("top_logprobs") or []
        return [{"token": p.get("token"), "id": p.get("id"), "logprob": p.get("logprob")} for p in result[:TOP]]


Side = tuple[ComparedServer, ServerAnswer]


def generated_prompts(count: int) -> list[str]:
    """Return `count` different prompts, the same ones on each call."""
    prompts = [form.format(topic) for topic in _TOPICS for form in _FORMS]
    n = len(prompts)
    return [prompts[i % n] + (f"({i // n + 1}) " if i >= n else "") for i in range(count)]


def differing_token(a: ServerAnswer, b: ServerAnswer) -> int:
    """Return the index of the first token at which two answers differ."""
    pairs = zip(a.tokens, b.tokens, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a.tokens), len(b.tokens)))


async def compare(servers: Sequence[ComparedServer], prompts: Sequence[VerifyRequest], parallel: int) -> dict[str, Any]:
    """Send all requests to all servers, `parallel` at a time to each; return the result in the format of `--json`."""
    await asyncio.gather(*(_ask_all(server, prompts, parallel) for server in servers))
    first = servers[0]
    differences: list[dict[str, Any]] = []
    n_different = 0
    for other in servers[1:]:
        for request, a, b in zip(prompts, first.answers, other.answers, strict=True):
            if a != b:
                n_different += 1
                if len(differences) < MAX_EXPLAINED:
                    differences.append(await _explain(request, (first, a), (other, b)))
    return {
        "equal": not n_different and not _conflicts(servers),
        "prompts": len(prompts),
        "parallel": parallel,
        "servers": [{"url": server.url, "receipt": server.receipt} for server in servers],
        "different_answers": n_different,
        "differences": differences,
        "conflicts": _conflicts(servers),
        "notes": _notes(servers),
    }


async def _ask_all(server: ComparedServer, prompts: Sequence[VerifyRequest], parallel: int) -> None:
    limit = asyncio.Semaphore(parallel)

    async def ask(request: VerifyRequest) -> ServerAnswer:
        async with limit:
            return await server.ask(request)

    server.answers = list(await asyncio.gather(*map(ask, prompts)))


async def _explain(request: VerifyRequest, one: Side, other: Side) -> dict[str, Any]:
    """Describe the first differing token: the likely tokens there, and if each idle server repeats its answer."""
    place = differing_token(one[1], other[1])
    before = one[1].tokens[:place]
    sides = []
    for server, answer in (one, other):
        sides.append(
            {
                "url": server.url,
                "token": answer.tokens[place] if place < len(answer.tokens) else None,
                "content": answer.content,
                "top": await server.top(request, before),
                "repeats_itself": await server.ask(request) == answer,
            }
        )
    return {"prompt": request.prompt, "number": request.number, "seed": request.seed, "token": place, "sides": sides}


def _differ(servers: Sequence[ComparedServer], name: str) -> bool:
    values = [json.dumps(s.receipt[name], sort_keys=True) for s in servers if s.receipt.get(name) is not None]
    return len(set(values)) > 1


def _conflicts(servers: Sequence[ComparedServer]) -> list[str]:
    """Return differences that prevent equal answers."""
    hashes = {tuple(f["sha256"] for f in s.receipt["files"]) for s in servers if s.receipt.get("files")}
    result = ["the model files differ"] if len(hashes) > 1 else []
    return result + (["the sampler profiles differ"] if _differ(servers, "profile_id") else [])


def _notes(servers: Sequence[ComparedServer]) -> list[str]:
    """Return differences that can change answers, but need not."""
    names = {"build": "builds", "instruction_set": "instruction sets", "model": "model names"}
    result = [f"the {what} differ" for name, what in names.items() if _differ(servers, name)]
    plain = [server.url for server in servers if "profile_id" not in server.receipt]
    return result + ([f"no receipts from {', '.join(plain)}: the model file is not compared"] if plain else [])


def run_verify(flags: ParsedFlags, urls: Sequence[str]) -> int:
    """Compare servers and return the exit code: 0 all equal, 1 something differs. Raises FlagError, LlamadoError."""
    if len(urls) < 2:
        raise FlagError("verify: expected two or more URLs")
    for key, name in (("count", "-n"), ("parallel", "--parallel"), ("verify_tokens", "--n-predict")):
        if flags.values[key] < 1:
            raise FlagError(f"{name}: expected 1 or more, got {flags.values[key]}")
    if flags.prompts:
        texts = [line for line in read_file("--prompts", flags.prompts).splitlines() if line.strip()]
        if not texts:
            raise FlagError(f"--prompts {flags.prompts}: no prompt in the file")
        texts = [texts[i % len(texts)] for i in range(flags.count if "count" in flags.given else len(texts))]
    else:
        texts = generated_prompts(flags.count)
    prompts = [VerifyRequest(i, text, flags.verify_tokens, flags.verify_temperature) for i, text in enumerate(texts)]
    result = asyncio.run(_run(urls, prompts, flags.parallel, flags.verify_key))
    if flags.json:
        print(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        _print(result)
    return 0 if result["equal"] else 1


async def _run(urls: Sequence[str], prompts: Sequence[VerifyRequest], parallel: int, key: str | None) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(AsyncLlamaServerClient(url, api_key=key)) for url in urls]
        try:
            return await compare([ComparedServer(client) for client in clients], prompts, parallel)
        except RequestFailed as error:
            raise CompareError(f"the servers cannot be compared: {error}") from None


def _print(result: dict[str, Any]) -> None:
    for server in result["servers"]:
        receipt = server["receipt"]
        files = ", ".join(f"{f['name']} {(f['sha256'] or 'gone')[:12]}" for f in receipt.get("files", ()))
        more = f"{files or receipt.get('path') or ''} {receipt.get('instruction_set') or ''}".strip()
        profile = f", profile {receipt['profile_id']}" if "profile_id" in receipt else ""
        print(f"{server['url']}: {receipt.get('build')}, {more}{profile}")
    for note in (*result["conflicts"], *result["notes"]):
        print(f"note: {note}")
    for difference in result["differences"]:
        print(f"\nprompt {difference['number']} (seed {difference['seed']}): token {difference['token']} differs")
        for side in difference["sides"]:
            top = ", ".join(f"{p['token']!r} {p['logprob']:.4f}" for p in side["top"] if p["logprob"] is not None)
            again = "" if side["repeats_itself"] else "; its answer differs again when idle"
            print(f"  {side['url']}: {side['token']} of {top}{again}")
    n, bad = result["prompts"], result["different_answers"]
    if result["equal"]:
        print(f"{n} prompts, {result['parallel']} at once: all answers equal, byte by byte")
    else:
        print(f"\n{n} prompts, {result['parallel']} at once: {bad} answer(s) differ", file=sys.stdout)
