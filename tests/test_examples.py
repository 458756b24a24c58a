"""Every file of examples/ runs, with a tiny model for the one it would take."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_models import make_llama
from waiting import until

EXAMPLES = Path(__file__).parent.parent / "examples"
FAKE_SERVER = Path(__file__).parent / "server" / "fake_server.py"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("examples") / "tiny.gguf", n_vocab=320, n_ctx=4096, n_layer=4)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of a server that answers without computing."""
    port = tmp_path / "port"
    process = subprocess.Popen([sys.executable, str(FAKE_SERVER), str(port)], stderr=subprocess.DEVNULL)
    try:
        until(lambda: (port.exists() and port.read_text()) or process.poll() is not None)
        assert process.poll() is None
        yield f"http://127.0.0.1:{port.read_text()}"
    finally:
        process.kill()
        process.wait()


def run(name: str, argument: object) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), str(argument)], capture_output=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr.decode("utf-8", "replace")
    return done.stdout.decode("utf-8", "replace")


@pytest.mark.full
def test_completion(model: Path) -> None:
    assert run("completion.py", model).strip()


@pytest.mark.full
def test_chat(model: Path) -> None:
    first, _, rest = run("chat.py", model).partition("\n> And how many people live there?\n")
    assert first.startswith("> What is the capital of France?\n")
    assert rest.strip()


@pytest.mark.full
def test_json_schema(model: Path) -> None:
    found = json.loads(run("json_schema.py", model))
    assert set(found) == {"city", "country", "continent"} and len(found["city"]) <= 40


@pytest.mark.full
def test_tools(model: Path) -> None:
    called = run("tools.py", model).splitlines()[0]
    assert called.startswith("temperature({'city': ") and "degrees Celsius in" in called


@pytest.mark.full
def test_embeddings(model: Path) -> None:
    lines = run("embeddings.py", model).splitlines()
    nearness = [float(line.split()[0]) for line in lines]
    assert len(lines) == 3 and nearness == sorted(nearness, reverse=True) and all(-1 <= one <= 1 for one in nearness)


@pytest.mark.full
def test_two_workers(model: Path) -> None:
    """The answer is the one of this machine alone."""
    from llamado import Llama

    with Llama(str(model), n_ctx=512, n_threads=1) as alone:
        expected = alone("1, 2, 3, 4,", max_tokens=16, temperature=0.0)["choices"][0]["text"]
    out = run("two_workers.py", model)
    assert out.count("Server is ready!") == 2 and expected in out


@pytest.mark.full
def test_client(server: str) -> None:
    assert run("client.py", server).splitlines() == ["model: /models/fake.gguf", "x" * 32]


def test_all_examples_are_run() -> None:
    text = Path(__file__).read_text()
    assert all(f'run("{path.name}"' in text for path in EXAMPLES.glob("*.py")) and any(EXAMPLES.glob("*.py"))
