"""The table of request parameters: names, types, limits, defaults and descriptions.

The flags that set defaults, the fields of bodies, `generation_settings`, the OpenAPI document and `docs/parameters.md`
are generated from `PARAMETERS`. Names, types and limits are llama-server's (tools/server/README.md, server-schema.cpp,
b11434); the rows are in the order of its `generation_settings`.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from dataclasses import dataclass
from typing import Any

from llamado.engine.request import GenerationParams
from llamado.engine.sampling.params import Sampling

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
FLOAT32_MAX = 3.4028234663852886e38

_SAMPLING = frozenset(f.name for f in dataclasses.fields(Sampling))
_PARAMS = frozenset(f.name for f in dataclasses.fields(GenerationParams))


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One row. Its name is that of a field of the engine's Sampling or Request, or of the server's own."""

    name: str
    type: str
    """boolean, integer, number, or a special form: seed, texts, biases …"""
    help: str
    form: str = ""
    """The form in a request body, if it differs from that of a flag."""
    names: tuple[str, ...] = ()
    """Names of the field in request bodies, in order of preference; OpenAI's name is the last."""
    responses: str = ""
    """Its name in the Responses API, if it differs."""
    messages: str = ""
    """Its name in Anthropic's Messages API; "": not part of that API."""
    ollama: str = ""
    """Its name among the `options` of Ollama's API; "": not part of that API."""
    flags: str = ""
    """Flags that set the default; "": none."""
    off_flags: str = ""
    env: str = ""
    metavar: str = ""
    served: bool = False
    """True if only `llamado serve` has the flags."""
    low: float = -(2**31)
    high: float = INT32_MAX
    hard: bool = False
    """True if a value outside of the limits is an error instead of being clamped."""
    keys: tuple[str, ...] = ()
    """Its names in `generation_settings`."""
    brief: bool = True
    """True if `/slots` and `/props` show it, too."""

    @property
    def of(self) -> str:
        """The record that holds it: sampling, request (the other GenerationParams), or server."""
        return "sampling" if self.name in _SAMPLING else "request" if self.name in _PARAMS else "server"

    @property
    def default(self) -> Any:
        """The default value; None if the server decides."""
        if self.of == "server":
            return _SERVER_DEFAULTS.get(self.name)
        return getattr(Sampling() if self.of == "sampling" else GenerationParams(), self.name)


_SERVER_DEFAULTS = {"stream": False, "n": 1, "sse_ping_interval": 30, "verbose": False, "echo": False, "receipt": False}


def _row(name: str, type: str, help: str, **more: Any) -> Parameter:
    """Make a row. `names` and `keys` are separated by spaces, "" for none; the default is the row's own name."""
    for key in ("names", "keys"):
        more[key] = tuple(more.get(key, name).split())
    return Parameter(name=name, type=type, help=help, **more)


def _int(name: str, help: str, *, low: int = 0, hard: bool = True, **more: Any) -> Parameter:
    return _row(name, "integer", help, low=low, hard=hard, **{"metavar": "N"} | more)


def _number(name: str, help: str, low: float = -math.inf, high: float = math.inf, **more: Any) -> Parameter:
    return _row(name, "number", help, low=low, high=high, **{"metavar": "X"} | more)


def _bool(name: str, help: str, **more: Any) -> Parameter:
    return _row(name, "boolean", help, **more)


# fmt: off
PARAMETERS: tuple[Parameter, ...] = (
    _row("seed", "seed", "seed of the sampler: an integer or a text (-1: random)", flags="-s --seed",
         metavar="SEED", ollama="seed"),
    _number("temperature", "temperature (0: greedy)", 0.0, flags="--temp --temperature", env="LLAMA_ARG_TEMPERATURE",
            metavar="T", messages="temperature", ollama="temperature"),
    _number("dynatemp_range", "dynamic temperature: range around the temperature (0: off)",
            flags="--dynatemp-range", metavar="T"),
    _number("dynatemp_exponent", "dynamic temperature: exponent of the entropy", flags="--dynatemp-exp"),
    _int("top_k", "sample from the K most likely tokens (0: all)", hard=False, flags="--top-k", env="LLAMA_ARG_TOP_K",
         metavar="K", messages="top_k", ollama="top_k"),
    _number("top_p", "sample from the most likely tokens with total probability P (1: all)", 0.0, 1.0, flags="--top-p",
            env="LLAMA_ARG_TOP_P", metavar="P", messages="top_p", ollama="top_p"),
    _number("min_p", "minimum probability relative to the most likely token's (0: any)", 0.0, 1.0, flags="--min-p",
            env="LLAMA_ARG_MIN_P", metavar="P", ollama="min_p"),
    _number("top_n_sigma", "keep tokens within N standard deviations of the highest logit (-1: off)",
            flags="--top-nsigma --top-n-sigma", metavar="N"),
    _number("xtc_probability", "XTC: probability of removing the most likely tokens (0: off)", 0.0, 1.0,
            flags="--xtc-probability", metavar="P"),
    _number("xtc_threshold", "XTC: minimum probability of tokens to remove (above 0.5: off)", 0.0, 1.0,
            flags="--xtc-threshold", metavar="P"),
    _number("typical_p", "locally typical sampling (1: off)", flags="--typical --typical-p", metavar="P",
            ollama="typical_p"),
    _int("repeat_last_n", "number of last tokens that the penalties consider (0: none)", flags="--repeat-last-n",
         ollama="repeat_last_n"),
    _number("repeat_penalty", "penalty for repeated tokens (1: off)", flags="--repeat-penalty",
            env="LLAMA_ARG_REPEAT_PENALTY", ollama="repeat_penalty"),
    _number("presence_penalty", "penalty for tokens that have appeared (0: off)", flags="--presence-penalty",
            env="LLAMA_ARG_PRESENCE_PENALTY", ollama="presence_penalty"),
    _number("frequency_penalty", "penalty that grows with each appearance of a token (0: off)",
            flags="--frequency-penalty", env="LLAMA_ARG_FREQUENCY_PENALTY", ollama="frequency_penalty"),
    _number("dry_multiplier", "DRY: scale of the penalty for repeated sequences (0: off)", flags="--dry-multiplier"),
    _number("dry_base", "DRY: base of the penalty, which grows exponentially", flags="--dry-base"),
    _int("dry_allowed_length", "DRY: longest repetition without a penalty, in tokens", flags="--dry-allowed-length"),
    _int("dry_penalty_last_n", "DRY: number of last tokens to search (0: none)", flags="--dry-penalty-last-n"),
    _row("dry_sequence_breakers", "breakers",
         "DRY: sequence breaker (a text); may be repeated; none: no breakers", flags="--dry-sequence-breaker",
         metavar="TEXT", form="DRY: sequence breakers (texts)", brief=False),
    _int("mirostat", "Mirostat: 0 off, 1 Mirostat, 2 Mirostat 2.0", high=2, hard=False, flags="--mirostat",
         ollama="mirostat"),
    _number("mirostat_tau", "Mirostat: target entropy (tau)", flags="--mirostat-ent", ollama="mirostat_tau"),
    _number("mirostat_eta", "Mirostat: learning rate (eta)", flags="--mirostat-lr", ollama="mirostat_eta"),
    _number("adaptive_target", "adaptive-p: prefer tokens near this probability (negative: off)", -FLOAT32_MAX, 1.0,
            flags="--adaptive-target", metavar="P"),
    _number("adaptive_decay", "adaptive-p: how slowly the target adapts, 0 to 0.99", 0.0, 0.99, hard=True,
            flags="--adaptive-decay"),
    _row("stop", "texts", "stop string; may be repeated", flags="-r --reverse-prompt", metavar="TEXT",
         form="texts that end the output", messages="stop_sequences", brief=False, ollama="stop"),
    _int("n_predict", "maximum number of tokens to generate (-1: no limit)", low=-1, flags="-n --predict --n-predict",
         env="LLAMA_ARG_N_PREDICT", names="n_predict max_completion_tokens max_tokens", responses="max_output_tokens",
         messages="max_tokens", keys="max_tokens n_predict", ollama="num_predict"),
    _int("n_keep", "prompt tokens to keep when the context is shifted (-1: all)", low=-1, flags="--keep",
         ollama="num_keep"),
    _int("n_discard", "tokens to drop when the context is shifted (0: half of the others)"),
    _bool("ignore_eos", "ignore the end-of-sequence token and continue generating", flags="--ignore-eos"),
    _bool("stream", "stream the output as it is generated", messages="stream"),
    _row("logit_bias", "biases", "logit bias: TOKEN_ID+BIAS or TOKEN_ID-BIAS; may be repeated", flags="-l --logit-bias",
         metavar="BIAS", form="[[token or text, bias or false], …] or {token or text: bias}", brief=False),
    _int("n_probs", "number of most likely tokens to report at each position", hard=False, names="n_probs logprobs"),
    _int("min_keep", "minimum number of candidates that samplers keep"),
    _row("grammar", "text", "GBNF grammar for the output", brief=False),
    _row("json_schema", "schema", "JSON schema for the output", keys=""),
    _bool("grammar_lazy", "apply the grammar only after a trigger", brief=False),
    _row("grammar_triggers", "triggers", "triggers of a lazy grammar", brief=False),
    _row("preserved_tokens", "tokens", "special tokens to keep as text", brief=False),
    _row("samplers", "samplers", "sampler chain, in order, separated by ';'", flags="--samplers", metavar="NAMES",
         form="the sampler chain, in order"),
    _bool("timings_per_token", "include timings in every chunk of a stream"),
    _bool("post_sampling_probs", "report probabilities as they are after the sampler chain"),
    _bool("backend_sampling", "accepted"),
    _row("lora", "scales", "LoRA adapter scales by id"),
    # parameters that are not in `generation_settings`
    _int("n_indent", "minimum indentation of generated lines", keys=""),
    _int("t_max_predict_ms", "time limit of generation in ms, applied at the next new line", low=-1, high=INT64_MAX,
         keys=""),
    _bool("cache_prompt", "reuse the KV cache of earlier requests", flags="--cache-prompt",
          off_flags="--no-cache-prompt", env="LLAMA_ARG_CACHE_PROMPT", served=True, keys=""),
    _bool("special", "include special tokens in the output as text", flags="-sp --special", served=True, names="",
          keys=""),
    _bool("return_tokens", "return the IDs of the generated tokens", keys=""),
    _bool("return_progress", "report the progress of prompt processing in a stream", keys=""),
    _row("id_slot", "slot", "slot to use (-1: any)", keys=""),
    _int("n", "number of answers per prompt", low=1, names="n_cmpl n", keys=""),
    _int("n_cache_reuse", "accepted without effect: reusing shifted chunks would change outputs", keys=""),
    _int("sse_ping_interval", "seconds without data after which a stream sends a comment (-1: never)", low=-1,
         flags="--sse-ping-interval", env="LLAMA_ARG_SSE_PING_INTERVAL", served=True, keys=""),
    _row("include_usage", "stream_options", "include_usage: report token counts at the end of a stream",
         names="stream_options", keys=""),
    _row("response_fields", "fields", "fields to include in the response", keys=""),
    _bool("verbose", "include the native response as `__verbose`", keys=""),
    _bool("receipt", "include `llamado_receipt`: build, SHA-256 of the model, instruction set, settings",
          keys=""),
    _bool("echo", "`/v1/completions`: start the output with the prompt, including its `logprobs`; chat: start with the "
          "client's prefill, also in a stream", keys=""),
)
# fmt: on

BY_NAME = {row.name: row for row in PARAMETERS}


def markdown() -> str:
    """Return the table as a Markdown page (`docs/parameters.md`)."""
    lines = [
        "# Request parameters",
        "",
        "Made from `src/llamado/engine/parameters.py` by `python -m llamado.engine.parameters`. If a field has "
        "several names, the first one given counts. Flags set the defaults.",
        "",
        "`/completion`, `/infill`, `/v1/completions` and `/v1/chat/completions` accept all fields. In chats, "
        "`logprobs` is OpenAI's boolean beside `top_logprobs`. `/v1/responses` accepts them too, except for the names "
        "in its column. Ollama's `/api/chat` and `/api/generate` accept some of them in their `options`.",
        "",
        "| field | type | limits | default | `/v1/responses` | `/v1/messages` | Ollama | flags | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in PARAMETERS:
        cells = [
            _words(row.names), row.type, _limits(row), _default(row.default), _words(row.responses.split()),
            _words(row.messages.split()), _words(row.ollama.split()),
            _words((*row.flags.split(), *row.off_flags.split())), row.form or row.help,
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def _words(words: tuple[str, ...] | list[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _limits(row: Parameter) -> str:
    """Return the limits that are narrower than those of the type."""
    if row.type not in ("integer", "number"):
        return ""
    low = f"≥ {row.low:g}" if math.isfinite(row.low) and row.low > -FLOAT32_MAX else ""
    high = f"≤ {row.high:g}" if row.high < INT32_MAX else ""
    shown = ", ".join(part for part in (low, high) if part)
    return f"{shown} (else 400)" if shown and row.hard else shown


def _default(value: Any) -> str:
    if value is None or value in ([], {}, ()):
        return ""
    shown = ";".join(value) if isinstance(value, tuple) and all(name.isidentifier() for name in value) else value
    return f"`{shown!r}`" if not isinstance(shown, str) else f"`{shown}`"


if __name__ == "__main__":
    sys.stdout.write(markdown())
