"""Remedies of `llamado doctor`: they are complete, and their commands and flags exist."""

from __future__ import annotations

import re
import shlex
from itertools import combinations
from pathlib import Path

import pytest
from parsers import parser_of

from llamado import flags
from llamado.cluster.doctor.logs import PATTERNS
from llamado.cluster.doctor.symptoms import SYMPTOMS, fields_of, finding
from llamado.commands import cli

VALUES: dict[str, object] = {
    "host": "10.0.0.2", "port": 50052, "url": "http://10.0.0.2:8080", "pid": 4242, "program": "a program", "free": 4711,
    "more": 8, "listen": "10.0.0.2", "all": "10.0.0.2:50052,10.0.0.3:50052", "folder": "/models",
    "path": "/models/m.gguf", "fits": "llamado serve -m /models/m.gguf -c 4096", "pattern": "m*", "flag": "--lora",
    "instead": "it is new", "name": "gemma3", "needed": "9G", "cores": 4,
}  # fmt: skip
CAPITALS = {
    "TCP", "URL", "LISTEN", "CONT", "LLAMADO_CACHE", "LLAMA_CACHE", "CPU", "Q4_K_M", "USER", "CUDA_VISIBLE_DEVICES",
    "NVIDIA", "CUDA1",
}  # fmt: skip
"""Words in capitals that are not placeholders."""
OTHERS = {
    "-ltnp", "-tnp", "-i", "-ti", "-sTCP", "-CONT", "-connect", "-noout", "-subject", "-dates", "-ext", "-hex", "-zv",
    "-brief", "-la", "-u", "-sh", "-R", "-l", "-n", "--memory", "--ulimit", "--allow-requantize", "-C", "-iE", "-aG",
    "--gpus",
}  # fmt: skip
"""Flags of other programs in remedies."""
OF_RPC_SERVER = {"-H", "-p", "-d", "-c", "-t"}  # tools/rpc/rpc-server.cpp (b11434)
REMEDIES = [(symptom, remedy) for symptom, row in SYMPTOMS.items() for remedy in row.remedies]
_OPTION = re.compile(r"(?<![\w.{-])--?[A-Za-z][\w-]*")


def filled(remedy: str) -> str:
    return remedy.format(**VALUES)


@pytest.mark.parametrize(("symptom", "remedy"), REMEDIES)
def test_remedies_have_no_placeholders(symptom: str, remedy: str) -> None:
    text = filled(remedy)
    assert not re.search(r"[{}…]|<[a-z]", text)
    assert set(re.findall(r"\b[A-Z][A-Z0-9_]+\b", text)) <= CAPITALS
    assert not re.search(r"-\w+ [A-Z]\b", text)


def test_remedies_with_fewer_fields_come_later() -> None:
    for row in SYMPTOMS.values():
        counts = [len(fields_of(remedy)) for remedy in row.remedies]
        assert counts == sorted(counts, reverse=True) and len(set(row.remedies)) == len(counts)


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.expression.pattern[:40])
def test_log_patterns_fill_in_a_remedy(pattern: object) -> None:
    """With any of its groups missing; a pattern without alternatives always has all of them."""
    groups = pattern.expression.groupindex  # type: ignore[attr-defined]
    alternatives = "|" in re.sub(r"\(\?:[^()]*\)", "", pattern.expression.pattern)  # type: ignore[attr-defined]
    for n in range(0 if alternatives else len(groups), len(groups) + 1):
        for chosen in combinations(groups, n):
            finding(pattern.symptom, "log:1", "a line", **{name: VALUES.get(name, "x") for name in chosen})  # type: ignore[attr-defined]


def test_missing_fields_raise_an_error() -> None:
    with pytest.raises(LookupError, match="wants-tls"):
        finding("wants-tls", "here", "it", host="10.0.0.2", port=None)


@pytest.mark.parametrize(("symptom", "remedy"), REMEDIES)
def test_commands_and_flags_of_a_remedy_exist(symptom: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = filled(remedy)
    for command in re.findall(r"(?<![\w/])llamado ([a-z]+)(?= |$)", text):
        assert command in cli.COMMANDS or command in {"with", "plan"}, command
    ours = {name for flag in flags.FLAGS for name in flag.names + flag.off_names} | {"--version", "--help"}
    theirs = set((Path(__file__).parents[1] / "llama_server_flags.txt").read_text().split()) | OF_RPC_SERVER
    assert set(_OPTION.findall(text)) <= ours | theirs | OTHERS
    for program, options in (("rpc-server", OF_RPC_SERVER), ("llama-server", theirs)):
        used = " ".join(re.findall(program + r" ((?:-\S+ \S+ ?)+)", text))
        assert set(_OPTION.findall(used)) <= options
    words = text.partition("   #")[0]
    if words.startswith("llamado "):
        command, *arguments = shlex.split(words)[1:]
        if command.startswith("-"):
            assert [command, *arguments] == ["--version"]
        elif "--help" not in arguments:
            flags.parse(parser_of(command), command, arguments, {})


def test_only_replica_missing_recommends_doctor() -> None:
    """For a replica, doctor is recommended with another URL; otherwise the remedy would be doctor itself."""
    assert {symptom for symptom, remedy in REMEDIES if remedy.startswith("llamado doctor")} == {"replica-missing"}
