"""Tests start from one environment, and leave it as they found it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import environment
import pytest
import tiers


def test_environment_variables_do_not_reach_tests() -> None:
    removed = (
        "LC_ALL", "NO_COLOR", "COLUMNS", "https_proxy", "NO_PROXY", "HF_TOKEN", "LLAMA_ARG_PORT", "LLAMADO_LAB",
        "LLAMADO_SIMD", "XDG_CONFIG_HOME", "PYTHONUNBUFFERED", "CUDA_VISIBLE_DEVICES",
    )  # fmt: skip
    kept = ("HOME", "PATH", "PIP_INDEX_URL", "LLAMADO_CACHE", "LLAMADO_CPU")
    usual = {"TERM": "xterm-256color", "LANG": "C.UTF-8", "TZ": "UTC", "LLAMADO_LIBCUDA": "none: tests use no card"}
    given = dict.fromkeys((*removed, *kept, *usual), "given")
    assert environment.neutral(given) == dict.fromkeys(kept, "given") | usual
    with_card = environment.neutral(given | {"LLAMADO_TEST_CUDA": "real"})
    assert "LLAMADO_LIBCUDA" not in with_card, "tests on a real card find its driver"
    assert environment.neutral(os.environ).items() <= os.environ.items(), "this process has it"


def test_servers_of_other_users_are_hidden() -> None:
    assert "llamado-tests-" in os.environ["XDG_RUNTIME_DIR"]


def test_downloads_use_the_users_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_original", {"HTTPS_PROXY": "http://proxy"})
    before = dict(os.environ)
    with environment.original():
        assert os.environ["HTTPS_PROXY"] == "http://proxy" and "TERM" not in os.environ
    assert dict(os.environ) == before


def test_the_longest_files_are_there() -> None:
    assert [name for name in tiers.LONGEST if not (Path(__file__).parent / name).exists()] == []


def test_no_dns_is_asked() -> None:
    with pytest.raises(socket.gaierror):
        socket.getaddrinfo("example.com", 80)
    for host in ("127.0.0.1", "::1", "localhost", None):
        assert socket.getaddrinfo(host, 80)
