"""Servers for real clients: SmolLM2 for chats, and the same model for embeddings."""

from __future__ import annotations

import os
import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

LLAMADO = os.environ.get("LLAMADO")
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # litellm would ask the internet for prices
os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"
os.environ.setdefault("OPENAI_API_KEY", "no-key")  # some ask for one before they look where they go

if LLAMADO is None:  # these tests have an environment of their own
    collect_ignore_glob = ["test_*.py"]


@contextmanager
def running(log: Path, *options: str) -> Iterator[str]:
    """The address of a server that is ready."""
    assert LLAMADO is not None
    command = [LLAMADO, "serve", "-m", "smollm2", "-c", "8192", "-np", "4", "--port", "0", *options]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + 120
        url = ""
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
            if found is not None:
                url = found[0]
                try:
                    with urllib.request.urlopen(f"{url}/health", timeout=60) as response:
                        if response.status == 200:
                            break
                except OSError:
                    pass
            time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server for chats; its alias is smollm2."""
    log = tmp_path_factory.mktemp("serve") / "log"
    with running(log, "-a", "smollm2", "--metrics", "--props", "--slot-save-path", str(log.parent)) as url:
        yield url


@pytest.fixture(scope="session")
def embedding_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server for embeddings."""
    with running(tmp_path_factory.mktemp("embed") / "log", "--embeddings", "--pooling", "mean") as url:
        yield url
