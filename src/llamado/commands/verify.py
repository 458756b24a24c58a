"""`llamado verify`: whether servers give the same answers to the same prompts and seeds, under load, byte by byte."""

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
from llamado.flags import FlagError, Parsed
from llamado.terminal.text import print

TOP = 5
"""Likeliest tokens that are shown of both servers where they part."""
EXPLAINED = 8
"""Differences that are looked into; the others are counted."""
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


class CannotCompare(LlamadoError):
    """A server gives no answer to compare."""


@dataclass(frozen=True)
class Asked:
    """One prompt, and what all servers are asked for with it."""

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
    """What a server said."""

    content: str
    tokens: tuple[int, ...]
    stop: str


@dataclass
class ComparedServer:
    """One that is compared: its address, what it runs, what it said to each prompt."""

    client: AsyncLlamaServerClient
    answers: list[ServerAnswer] = field(default_factory=list)
    receipt: dict[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.client.base_url

    async def ask(self, asked: Asked) -> ServerAnswer:
        """Raises RequestFailed, ServerUnavailable."""
        told = await self.client.completion(asked.prompt, **asked.options)
        if not self.receipt:
            self.receipt = told.get("llamado_receipt") or await self._facts(told)
        return ServerAnswer(str(told.get("content")), tuple(told.get("tokens") or ()), str(told.get("stop_type")))

    async def _facts(self, told: dict[str, Any]) -> dict[str, Any]:
        """What a server without receipts tells of itself."""
        props = await self.client.props()
        return {
            "build": props.get("build_info"),
            "model": told.get("model"),
            "path": props.get("model_path"),
            "settings": told.get("generation_settings"),
        }

    async def top(self, asked: Asked, before: Sequence[int]) -> list[dict[str, Any]]:
        """The likeliest tokens after a prompt and the tokens `before`. Raises RequestFailed, ServerUnavailable."""
        prompt = await self.client.tokenize(asked.prompt, add_special=True)
        told = await self.client.completion([*prompt, *before], n_predict=1, n_probs=TOP, temperature=0.0)
        places = told.get("completion_probabilities") or [{}]
        found = places[0].get("top_logprobs") or []
        return [{"token": p.get("token"), "id": p.get("id"), "logprob": p.get("logprob")} for p in found[:TOP]]


Side = tuple[ComparedServer, ServerAnswer]


def made_prompts(count: int) -> list[str]:
    """So many different prompts, always the same ones."""
    made = [form.format(topic) for topic in _TOPICS for form in _FORMS]
    return [f"{made[i % len(made)]}{'' if i < len(made) else f'({i // len(made) + 1}) '}" for i in range(count)]


def differing_token(a: ServerAnswer, b: ServerAnswer) -> int:
    """The place of the first token at which two answers part."""
    pairs = zip(a.tokens, b.tokens, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a.tokens), len(b.tokens)))


async def compare(servers: Sequence[ComparedServer], prompts: Sequence[Asked], parallel: int) -> dict[str, Any]:
    """Ask all servers for all prompts, `parallel` at a time each; what was found, as `--json` gives it."""
    await asyncio.gather(*(_ask_all(server, prompts, parallel) for server in servers))
    first = servers[0]
    differences: list[dict[str, Any]] = []
    n_different = 0
    for other in servers[1:]:
        for asked, a, b in zip(prompts, first.answers, other.answers, strict=True):
            if a != b:
                n_different += 1
                if len(differences) < EXPLAINED:
                    differences.append(await _explain(asked, (first, a), (other, b)))
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


async def _ask_all(server: ComparedServer, prompts: Sequence[Asked], parallel: int) -> None:
    room = asyncio.Semaphore(parallel)

    async def ask(asked: Asked) -> ServerAnswer:
        async with room:
            return await server.ask(asked)

    server.answers = list(await asyncio.gather(*map(ask, prompts)))


async def _explain(asked: Asked, one: Side, other: Side) -> dict[str, Any]:
    """Where two answers part, what was likely there, and whether each server repeats itself when it is idle."""
    place = differing_token(one[1], other[1])
    before = one[1].tokens[:place]
    sides = []
    for server, answer in (one, other):
        sides.append(
            {
                "url": server.url,
                "token": answer.tokens[place] if place < len(answer.tokens) else None,
                "content": answer.content,
                "top": await server.top(asked, before),
                "repeats_itself": await server.ask(asked) == answer,
            }
        )
    return {"prompt": asked.prompt, "number": asked.number, "seed": asked.seed, "token": place, "sides": sides}


def _differ(servers: Sequence[ComparedServer], name: str) -> bool:
    known = [json.dumps(s.receipt[name], sort_keys=True) for s in servers if s.receipt.get(name) is not None]
    return len(set(known)) > 1


def _conflicts(servers: Sequence[ComparedServer]) -> list[str]:
    """What has to be equal for answers to be."""
    hashes = {tuple(f["sha256"] for f in s.receipt["files"]) for s in servers if s.receipt.get("files")}
    found = ["the model files differ"] if len(hashes) > 1 else []
    return found + (["the sampler profiles differ"] if _differ(servers, "profile_id") else [])


def _notes(servers: Sequence[ComparedServer]) -> list[str]:
    """What may make answers differ, and need not."""
    names = {"build": "builds", "instruction_set": "instruction sets", "model": "names of the models"}
    found = [f"the {what} differ" for name, what in names.items() if _differ(servers, name)]
    plain = [server.url for server in servers if "profile_id" not in server.receipt]
    return found + ([f"no receipts from {', '.join(plain)}: the model file is not compared"] if plain else [])


def run_verify(flags: Parsed, urls: Sequence[str]) -> int:
    """Compare servers; the exit code: 0 all equal, 1 something differs. Raises FlagError, LlamadoError."""
    if len(urls) < 2:
        raise FlagError("verify: expected two or more addresses")
    for key, name in (("count", "-n"), ("parallel", "--parallel"), ("verify_tokens", "--n-predict")):
        if flags.values[key] < 1:
            raise FlagError(f"{name}: expected 1 or more, got {flags.values[key]}")
    if flags.prompts:
        texts = [line for line in read_file("--prompts", flags.prompts).splitlines() if line.strip()]
        if not texts:
            raise FlagError(f"--prompts {flags.prompts}: there is no prompt in it")
        texts = [texts[i % len(texts)] for i in range(flags.count if "count" in flags.given else len(texts))]
    else:
        texts = made_prompts(flags.count)
    prompts = [Asked(i, text, flags.verify_tokens, flags.verify_temperature) for i, text in enumerate(texts)]
    found = asyncio.run(_run(urls, prompts, flags.parallel, flags.verify_key))
    if flags.json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        _print(found)
    return 0 if found["equal"] else 1


async def _run(urls: Sequence[str], prompts: Sequence[Asked], parallel: int, key: str | None) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(AsyncLlamaServerClient(url, api_key=key)) for url in urls]
        try:
            return await compare([ComparedServer(client) for client in clients], prompts, parallel)
        except RequestFailed as error:
            raise CannotCompare(f"the servers cannot be compared: {error}") from None


def _print(found: dict[str, Any]) -> None:
    for server in found["servers"]:
        receipt = server["receipt"]
        files = ", ".join(f"{f['name']} {(f['sha256'] or 'gone')[:12]}" for f in receipt.get("files", ()))
        more = f"{files or receipt.get('path') or ''} {receipt.get('instruction_set') or ''}".strip()
        profile = f", profile {receipt['profile_id']}" if "profile_id" in receipt else ""
        print(f"{server['url']}: {receipt.get('build')}, {more}{profile}")
    for note in (*found["conflicts"], *found["notes"]):
        print(f"note: {note}")
    for difference in found["differences"]:
        print(f"\nprompt {difference['number']} (seed {difference['seed']}): token {difference['token']} differs")
        for side in difference["sides"]:
            top = ", ".join(f"{p['token']!r} {p['logprob']:.4f}" for p in side["top"] if p["logprob"] is not None)
            again = "" if side["repeats_itself"] else "; asked again when idle it says something else"
            print(f"  {side['url']}: {side['token']} of {top}{again}")
    n, bad = found["prompts"], found["different_answers"]
    if found["equal"]:
        print(f"{n} prompts, {found['parallel']} at once: all answers are equal, byte by byte")
    else:
        print(f"\n{n} prompts, {found['parallel']} at once: {bad} answer(s) differ", file=sys.stdout)
