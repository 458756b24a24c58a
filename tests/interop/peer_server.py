"""A real llama-server that runs while a test asks it, and the sum llama-perplexity prints."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
from ports import free_port

# cogvlm there gives rows from a batch's beginning on in the place of those that are asked for: right for batches of
# one. plm ends with a failed assertion in flash attention.
FLAGS = {"cogvlm": ["-ub", "1"], "plm": ["-fa", "off"]}
"""Options that the real llama.cpp needs for some of the small models."""


@contextmanager
def llama_server(programs: Path, model: Path, log: Path, *options: str) -> Iterator[httpx.Client]:
    """Client of a llama-server on the CPU with `model` loaded; its output goes to `log`."""
    port = free_port()
    address = ["--host", "127.0.0.1", "--port", str(port)]
    command = [str(programs / "llama-server"), "-m", str(model), *address, "-ngl", "0", "--no-webui", *options]
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
                deadline = time.monotonic() + 120
                while not _healthy(client):
                    ended = process.poll() is not None
                    assert not ended and time.monotonic() < deadline, log.read_text(errors="replace")[-2000:]
                    time.sleep(0.05)
                yield client
        finally:
            process.terminate()


def _healthy(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def llama_perplexity(programs: Path, model: Path, text: Path, options: Sequence[str]) -> tuple[float, list[float]]:
    """Return llama-perplexity's estimate for a text: the perplexity, and its running value after each chunk."""
    command = [str(programs / "llama-perplexity"), "-m", str(model), "-f", str(text), "-ngl", "0", *options]
    done = subprocess.run(command, capture_output=True, timeout=600)
    said = (done.stdout + done.stderr).decode(errors="replace")
    final = re.search(r"Final estimate: PPL = ([0-9.]+)", said)
    assert final is not None, said[-2000:]
    return float(final[1]), [float(value) for value in re.findall(r"\[\d+\]([0-9.]+)", said)]
