"""`/infill`: fill-in-the-middle completion of code, with other files as context (tools/server/README.md, b11434).

The prompt is assembled from tokens, so text of the client is never parsed as a special token. Models with tokens for
files get them in the form of a repository (https://arxiv.org/abs/2409.12186).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llamado.http.json_body import read_object
from llamado.server.api.openapi import describe
from llamado.server.api.routes import Routes
from llamado.server.errors import invalid, not_supported
from llamado.server.generate.formats import NativeFormat
from llamado.server.generate.generator import Generator
from llamado.server.generate.json_values import text
from llamado.server.generate.prompts import encode, tokenize_mixed
from llamado.server.model import ServedTokenizer

# Separator of files for models without a token for it.
_SEPARATOR = "\n\n--- snippet ---\n\n"
# Names of the repository and of the file to complete, for which the API has no fields.
_PROJECT, _FILE = "myproject", "filename"


@dataclass(frozen=True, kw_only=True)
class PromptBudget:
    """Sizes that limit the parts of a prompt, in tokens."""

    n_ctx: int
    n_batch: int
    n_predict: int


def check_model(tokenizer: ServedTokenizer) -> None:
    """Raise ApiError with the missing tokens for a model without fill-in-the-middle tokens."""
    tokens = {"prefix": tokenizer.fim_pre, "suffix": tokenizer.fim_suf, "middle": tokenizer.fim_mid}
    missing = "".join(f"{name} token is missing. " for name, token in tokens.items() if token is None)
    if missing:
        raise not_supported(f"Infill is not supported by this model: {missing}")


def _extra(body: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return name and text of each context file. Raises ApiError."""
    given = body.get("input_extra")
    if given is None:
        return []
    if not isinstance(given, list):
        raise invalid('"input_extra" must be an array of {"filename": string, "text": string}')
    files = []
    for chunk in given:
        fields = chunk if isinstance(chunk, dict) else {}
        if not isinstance(fields.get("text"), str):
            raise invalid('extra_context chunk must contain a "text" field with a string value')
        if not isinstance(fields.get("filename", ""), str):
            raise invalid('extra_context chunk\'s "filename" field must be a string')
        files.append((text(fields, "filename", "tmp"), fields["text"]))
    return files


def infill_prompt(
    body: Mapping[str, Any], tokenizer: ServedTokenizer, budget: PromptBudget, *, suffix_first: bool
) -> list[int]:
    """Return the tokens of a body's prompt.

    The prefix is cut to its last three quarters of a batch, the suffix to its first quarter, and the context files to
    the end that fits into the context. `suffix_first`: put the suffix before the prefix, for models trained so.
    Raises ApiError.
    """
    start = body.get("prompt")
    if start is not None and not isinstance(start, str):
        raise invalid('"prompt" must be a string')
    for name in ("input_prefix", "input_suffix"):
        if name not in body:
            raise invalid(f'"{name}" is required')
    files = _extra(body)

    def plain(given: Any) -> list[int]:
        return tokenize_mixed(given, tokenizer, add_special=False, parse_special=False)

    begun = encode(start or "", tokenizer, add_special=False, parse_special=True)
    quarter = budget.n_batch // 4
    prefix, suffix = plain(body["input_prefix"]), plain(body["input_suffix"])
    prefix = prefix[max(0, len(prefix) - 3 * quarter) :]
    suffix = suffix[: max(0, quarter - (2 + len(begun)))]
    before = [*_token(tokenizer.fim_pre), *prefix, *begun]
    after = [*_token(tokenizer.fim_suf), *suffix]
    first, second = (after, before) if suffix_first else (before, after)
    bos = _token(tokenizer.bos) if tokenizer.add_bos else []
    context = _context(files, tokenizer)
    n_context = min(len(context), max(0, budget.n_ctx - budget.n_batch - 2 * budget.n_predict))
    return [*context[len(context) - n_context :], *bos, *first, *second, *_token(tokenizer.fim_mid)]


def _token(token: int | None) -> list[int]:
    return [] if token is None else [token]


def _context(files: Sequence[tuple[str, str]], tokenizer: ServedTokenizer) -> list[int]:
    """Return the tokens of the repository: its name, the context files, and the name of the file to complete."""

    def plain(text: str) -> list[int]:
        return encode(text, tokenizer, add_special=False, parse_special=False)

    tokens: list[int] = []
    if tokenizer.fim_rep is not None:
        tokens += [tokenizer.fim_rep, *plain(f"{_PROJECT}\n")]
    for name, content in files:
        if tokenizer.fim_sep is not None:
            tokens += [tokenizer.fim_sep, *plain(f"{name}\n")]
        else:
            tokens += plain(_SEPARATOR)
        tokens += plain(content)
    if tokenizer.fim_sep is not None:
        tokens += [tokenizer.fim_sep, *plain(f"{_FILE}\n")]
    return tokens


def infill_router(generator: Generator) -> Routes:
    """Return the route of `/infill`."""
    router = Routes("generate")

    @router.post("/infill", **describe("infill"))
    async def infill(request: Request) -> Response:
        served = generator.served
        tokenizer = served.tokenizer
        check_model(tokenizer)
        body = await read_object(request)
        # As in llama-server: `n_predict` of the server counts, not of the request.
        budget = PromptBudget(n_ctx=served.info.n_ctx, n_batch=served.n_batch, n_predict=served.defaults.n_predict)

        def work() -> list[int]:
            return infill_prompt(body, tokenizer, budget, suffix_first=generator.switches.spm_infill)

        return await generator.complete(body, NativeFormat, native=True, prompt=work)

    return router
