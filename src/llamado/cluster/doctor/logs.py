"""Log explanation: patterns for lines of llama-server and rpc-server (llama.cpp b11434) and of llamado."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from llamado.cluster.doctor.symptoms import SYMPTOMS, Finding, finding
from llamado.errors import LlamadoError

_MOST_CHARACTERS = 4096
_SHOWN = 300


class LogError(LlamadoError):
    """A log that cannot be read."""


class Pattern(NamedTuple):
    """Log lines of a symptom. Groups of the expression fill in the fields of its remedy.

    `is_consequence`: the lines follow other lines that are more specific.
    """

    expression: re.Pattern[str]
    symptom: str
    is_consequence: bool = False


def _pattern(expression: str, symptom: str, *, is_consequence: bool = False) -> Pattern:
    assert symptom in SYMPTOMS, symptom
    return Pattern(re.compile(expression, re.IGNORECASE), symptom, is_consequence)


PATTERNS: tuple[Pattern, ...] = (
    # --- listening
    _pattern(r"couldn't bind HTTP server socket, hostname: (?P<host>\S+), port: (?P<port>\d+)", "port-taken"),
    _pattern(r"cannot listen on \S+?:(?P<port>\d+): Address already in use", "port-taken"),
    _pattern(r"Failed to create server socket|Address already in use", "port-taken"),
    _pattern(r"cannot listen on .*: Permission denied", "port-forbidden"),
    _pattern(r"cannot listen on .*: Cannot assign requested address", "not-this-machine"),
    _pattern(r"Too many open files", "open-files"),
    _pattern(r"security: no API key is set and CORS allows all origins", "no-key", is_consequence=True),
    _pattern(r"can be reached from other machines, and no key is asked for", "no-key"),
    _pattern(r"unauthorized: Invalid API Key", "wrong-key"),
    # --- workers
    _pattern(r"RPC server version mismatch: [\d.]+", "worker-version"),
    _pattern(r"speaks RPC [\d.]+, this program", "worker-version"),
    _pattern(r"HELLO request size mismatch|Expected HELLO command, update client", "worker-version"),
    _pattern(r"RPC handshake failed for (?P<host>[^\s:]+):(?P<port>\d+)", "worker-version", is_consequence=True),
    _pattern(r"Failed to connect to (?P<host>[^\s:]+):(?P<port>\d+)", "worker-refused"),
    _pattern(r"cannot connect to (?:tls://)?(?P<host>[^\s:]+):(?P<port>\d+): Connection refused", "worker-refused"),
    _pattern(r"(?:Cannot resolve host '(?P<host>[^']+)'|Name or service not known|"
             r"Temporary failure in name resolution)", "unknown-host"),
    _pattern(r"(?P<host>[^\s:]+):(?P<port>\d+) does not answer within", "unreachable"),
    _pattern(r"(?P<host>[^\s:]+):(?P<port>\d+) accepted the connection but does not greet", "worker-silent"),
    _pattern(r"if it wants TLS, it is tls://(?P<host>[^\s:]+):(?P<port>\d+)", "worker-wants-tls"),
    _pattern(r"no TLS with (?:tls://)?(?P<host>[^\s:]+):(?P<port>\d+): .*(?:not trusted|certificate)",
             "worker-certificate"),
    _pattern(r"no TLS with (?:tls://)?(?P<host>[^\s:]+):(?P<port>\d+)", "worker-no-tls"),
    _pattern(r"Remote RPC server crashed or returned malformed response", "worker-lost"),
    _pattern(r"(?:send|recv) failed \(bytes_(?:sent|recv)=", "worker-lost", is_consequence=True),
    _pattern(r"device CUDA\d+ is (?:lost|gone)|CUDA error: (?!out of memory)|has fallen off the bus", "card-lost"),
    _pattern(r"CUDA: not used: |ggml_cuda_init: failed to initialize CUDA", "card-unusable"),
    _pattern(r"(?P<worker>\S+) is (?:away|lost)|lost (?:the )?(?:worker|connection)|it closed the connection",
             "worker-lost", is_consequence=True),
    _pattern(r"Unknown command: \d+|Not a worker|it does not keep to the protocol|something else answers there",
             "not-a-worker"),
    _pattern(r"RPC connection failed", "worker-refused", is_consequence=True),
    _pattern(r"ggml_blas_graph_compute: unsupported op|pre-allocated tensor .* cannot run the operation",
             "device-same"),
    # --- the file
    _pattern(r"failed to open GGUF file '(?P<path>[^']+)' \(No such file|there is no file (?P<folder>[^;]+)",
             "no-file"),
    _pattern(r"failed to open GGUF file '(?P<path>[^']+)' \(Permission denied", "not-readable"),
    _pattern(r"Permission denied: '?(?P<path>[^']+\.gguf)", "not-readable"),
    _pattern(r"invalid magic characters: .* expected 'GGUF'|not a GGUF file|failed to read magic", "not-gguf"),
    _pattern(r"data is not within the file bounds, model is corrupted or incomplete|unexpectedly reached end of file|"
             r"the file ends too early|was not fetched whole", "truncated"),
    _pattern(r"failed to load GGUF split from|these are missing beside it|illegal split file idx|"
             r"invalid split (?:count|file)", "missing-part"),
    _pattern(r"unknown model architecture: '(?P<name>[^']+)'|architecture '[^']+' is not supported",
             "architecture"),
    _pattern(r"has invalid ggml type \d+|which has no kernel here", "weight-type"),
    _pattern(r"bad GGUF version|GGUFv1 is no longer supported|this GGUF file (?:is )?version \d+|"
             r"failed to read (?:header|key-value pairs|tensor info)|duplicate (?:key|tensor name)", "damaged"),
    _pattern(r"missing tensor '|wrong number of tensors|key not found in model|"
             r"unknown (?:pre-tokenizer type|tokenizer)|has wrong shape", "invalid-model"),
    _pattern(r"Ollama's manifest .* points to .* which is missing", "ollama-blob"),
    _pattern(r"Ollama's store .* has no model '(?P<name>[^']+)'", "ollama-model"),
    # --- memory
    _pattern(r"oom-?kill|Out of memory: Killed process|\bKilled\b", "killed"),
    _pattern(r"out of memory: |the model needs .* (?:is|are) free|unable to fit model into system memory", "too-large"),
    _pattern(r"failed to allocate (?:\S+ )?buffer|unable to allocate \S+ buffer|failed to allocate compute|"
             r"not enough space in the buffer|cudaMalloc failed|ErrorOutOfDeviceMemory|std::bad_alloc|out of memory|"
             r"tensor allocation failed|Failed to allocate input buffer|failed to allocate buffer", "out-of-memory"),
    _pattern(r"failed to mlock|cannot keep .* in RAM|--mlock: .* are not kept in RAM", "lock-limit"),
    # --- the disk
    _pattern(r"No space left on device", "disk-full"),
    _pattern(r"Failed to create cache directory: (?P<folder>\S+)|Read-only file system|cache .*Permission denied",
             "cache-not-writable"),
    # --- requests
    _pattern(r"exceeds the available context size|Context size has been exceeded|failed to find free space in the KV "
             r"cache", "context-full"),
    _pattern(r"no slot is available, defer task|no slot available|all slots are (?:busy|at work)", "no-slots"),
    _pattern(r"chat template parsing error|this custom template is not supported", "no-template"),
    _pattern(r"error: (?:invalid argument|unknown argument|invalid value)|error while handling argument|"
             r"llamado: .*(?:unknown flag|expected .* got)", "wrong-flag"),
    # --- the end
    _pattern(r"Segmentation fault|SIGSEGV|core dumped", "crash"),
    _pattern(r"GGML_ASSERT\(|ggml_abort|\bAborted\b", "crash", is_consequence=True),
    _pattern(r"exiting due to model loading error|failed to load model|error loading model", "failed-to-load",
             is_consequence=True),
)  # fmt: skip


def match(line: str) -> tuple[Pattern, dict[str, str]] | None:
    """Return the first pattern that matches a line, and the fields for its remedy."""
    for pattern in PATTERNS:
        found = pattern.expression.search(line)
        if found is not None:
            fields = {name: value for name, value in found.groupdict().items() if value}
            if "path" in fields:
                fields.setdefault("folder", os.path.dirname(fields["path"]) or ".")
            return pattern, fields
    return None


def explain(path: Path) -> list[Finding]:
    """Return the findings of a log in the order of their first lines, each symptom once. Raises LogError."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            return explain_lines(lines, str(path))
    except OSError as error:
        raise LogError(f"{path} cannot be read: {error.strerror or error}") from error


class _Match(NamedTuple):
    number: int
    line: str
    fields: dict[str, str]
    is_consequence: bool
    n_lines: int


def explain_lines(lines: Iterable[str], where: str) -> list[Finding]:
    """Return the findings of log lines. Consequences are left out if there are more specific findings.

    `where`: the log's name.
    """
    seen: dict[str, _Match] = {}
    for number, line in enumerate(lines, 1):
        found = match(line[:_MOST_CHARACTERS])
        if found is None:
            continue
        pattern, fields = found
        old = seen.get(pattern.symptom)
        if old is None or (old.is_consequence and not pattern.is_consequence):
            n_lines = 1 if old is None else old.n_lines + 1
            seen[pattern.symptom] = _Match(number, line.strip()[:_SHOWN], fields, pattern.is_consequence, n_lines)
        else:
            seen[pattern.symptom] = old._replace(n_lines=old.n_lines + 1)
    certain = [one for one in seen.items() if not one[1].is_consequence]
    chosen = certain or [one for one in seen.items() if one[0] != "no-key"]
    return [
        finding(
            symptom,
            f"{where}:{one.number}",
            one.line + (f" ({one.n_lines} times)" if one.n_lines > 1 else ""),
            **one.fields,
        )
        for symptom, one in chosen
    ]
