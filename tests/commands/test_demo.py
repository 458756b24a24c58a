"""`demo.sh` in a copy of the clone. Nothing is installed: `.venv` is a stand-in."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ports import free_port
from tiny import TINY, make
from tiny_models import make_llama

from llamado.commands import cli, demo
from llamado.devices.limits import MachineMemory
from llamado.devices.split.placement import NotEnoughMemory
from llamado.engine import supported
from llamado.flags import parse
from llamado.gguf.sources.catalog import LARGE
from llamado.gguf.sources.resolve import cache_dir

sys.path.insert(0, str(Path(__file__).parent.parent / "gguf"))
from stand_in_sites import Site, add_repo, serve

CLONE = Path(__file__).parents[2]
Run = Callable[..., subprocess.CompletedProcess[str]]
VARIABLES = ("WORKERS", "LATENCY1", "LATENCY2", "LATENCY3", "LLAMADO_DEMO_PORT", "PYTHON")


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def environment_of(clone: Path) -> dict[str, str]:
    return {"XDG_RUNTIME_DIR": str(clone.parent / "run")}


def services(clone: Path) -> list[dict[str, Any]]:
    """Return the running services of the demo, by `llamado ps`."""
    command = [sys.executable, "-m", "llamado", "ps", "--json"]
    done = subprocess.run(command, env=os.environ | environment_of(clone), capture_output=True, text=True)
    found: list[dict[str, Any]] = json.loads(done.stdout)[0]["services"]
    return found


def commands(clone: Path) -> list[list[str]]:
    """Return the command lines of the running processes of the demo, from `llamado` on."""
    found = []
    for service in services(clone):
        words = Path(f"/proc/{service['pid']}/cmdline").read_text().split("\0")[:-1]
        found.append(words[words.index("llamado") + 1 :])
    return found


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Path]:
    """A clone with an installed package. Kills its demo afterwards."""
    folder = tmp_path / "clone"
    folder.mkdir()
    for name in ("demo.sh", "bench.sh", "latency-proxy.py", "pyproject.toml"):
        (folder / name).write_bytes((CLONE / name).read_bytes())
        (folder / name).chmod(0o755)
    (folder / "src").symlink_to(CLONE / "src")
    script(folder / ".venv" / "bin" / "python", f'exec {shlex.quote(sys.executable)} "$@"')
    (folder / ".venv" / ".llamado-installed").touch()
    (tmp_path / "run").mkdir()
    yield folder
    state = tmp_path / "run" / "llamado" / "demo" / "state.json"
    if state.exists():  # its watchdog stops the others
        os.kill(json.loads(state.read_text())["pid"], signal.SIGKILL)


@pytest.fixture
def run(clone: Path, tmp_path: Path) -> Run:
    """Run demo.sh of the clone from another folder, with environment variables."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        environment |= {"PYTHONPATH": str(clone / "src"), "HF_HOME": str(tmp_path / "hf")}
        environment |= environment_of(clone)
        command = ["bash", f"{clone.name}/demo.sh", *arguments]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=environment | variables,
            capture_output=True,
            text=True,
            timeout=300,
            stdin=subprocess.DEVNULL,
        )

    return run


@pytest.mark.full
def test_chat_with_a_file_and_stop(run: Run, clone: Path, tmp_path: Path) -> None:
    make_llama(tmp_path / "tiny.gguf")
    port = free_port()
    done = run("tiny.gguf", LLAMADO_DEMO_PORT=str(port))  # relative to the working directory
    assert done.returncode == 0, done.stdout + done.stderr
    url = f"http://127.0.0.1:{port}"
    assert f"ready: {url}\n" in done.stdout and f"> {demo.QUESTION}\n" in done.stdout
    assert re.search(
        r"time to first token: \d+\.\d\d s after the request, \d+\.\d s after the start of the script", done.stdout
    )
    assert f"the demo keeps running at {url} (logs: .demo/; llamado ps)" in done.stdout
    assert "all slots are idle" in (clone / ".demo" / "server.log").read_text()
    # The model is split across two workers and the server.
    assert [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]] == ["tiny"]
    assert "llamacpp:tokens_predicted_total" in httpx.get(f"{url}/metrics").text
    first, second, server = commands(clone)
    assert first[0] == second[0] == "worker" and server[0] == "serve"
    assert server[server.index("--port") + 1] == str(port) and server[server.index("--tensor-split") + 1] == "1,1,1"
    assert server[server.index("--rpc") + 1] == ",".join(one["address"] for one in services(clone)[:2])
    again = run("tiny.gguf", LLAMADO_DEMO_PORT=str(port))
    assert again.returncode == 1 and f"a demo is already running at {url}" in again.stdout
    pids = [one["pid"] for one in services(clone)]
    assert run("stop").stdout == "demo has stopped\n"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert (run("stop").stdout, run("stop").returncode) == ("no demo is running\n", 0)


@pytest.mark.full
def test_a_slow_link_to_one_of_two_workers(run: Run, clone: Path, tmp_path: Path) -> None:
    make_llama(tmp_path / "tiny.gguf")
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        done = run(str(tmp_path / "tiny.gguf"), LATENCY1="2.5", LLAMADO_DEMO_PORT=str(taken))
    assert done.returncode == 0, done.stdout + done.stderr
    port = re.search(rf"port {taken} is in use; using (\d+)", done.stdout)
    assert port is not None and f"ready: http://127.0.0.1:{port[1]}" in done.stdout
    links = re.findall(r"worker (\d): (127\.0\.0\.1:\d+)(, link latency 2\.5 ms)?\n", done.stdout)
    assert [(number, bool(slow)) for number, _, slow in links] == [("1", True), ("2", False)]
    first, second, tap, server = commands(clone)
    assert first[0] == second[0] == "worker"
    assert tap[0] == "tap" and tap[tap.index("--latency-ms") + 1] == "2.5"
    assert tap[tap.index("--target-port") + 1] == first[first.index("-p") + 1]
    assert server[0] == "serve" and server[server.index("--port") + 1] == port[1]
    assert server[server.index("--rpc") + 1] == ",".join(address for _, address, _ in links)
    assert server[server.index("--tensor-split") + 1] == "1,1,1"
    pids = [one["pid"] for one in services(clone)]
    assert run("stop").stdout == "demo has stopped\n"
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.full
def test_server_fails_to_start(run: Run, clone: Path, tmp_path: Path) -> None:
    """The message has the reason, and the workers stop."""
    (tmp_path / "broken.gguf").write_bytes(b"no model")
    done = run("broken.gguf", WORKERS="1", LLAMADO_DEMO_PORT="0")
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    assert "server ended with exit code 1 before it was ready" in done.stdout and "not a GGUF file" in done.stdout
    assert run("stop").stdout == "no demo is running\n"


def test_help(run: Run, clone: Path) -> None:
    for flag in ("-h", "--help"):
        done = run(flag)
        assert done.returncode == 0 and done.stdout.startswith("Chat with a model in one command.")
        for said in (
            "gemma3",
            "glm",
            "qwen3",
            "LLAMADO_MODELS",
            "PATH.gguf",
            "stop",
            *(name for name in VARIABLES if name != "LATENCY3"),
        ):
            assert said in done.stdout
        assert "set -" not in done.stdout
    assert not (clone / ".demo").exists()


def stand_in(folder: Path, name: str, architecture: str) -> tuple[Site, bytes]:
    """Return a site with a small model of an architecture in place of the large one, and the model."""
    tiny = next(one for one in TINY.values() if one.architecture == architecture)
    content = make(tiny, folder / "tiny.gguf").read_bytes()
    site, entry = Site(headers={"ETag": f'"{"e" * 40}"'}), LARGE[name]
    add_repo(site, entry.repo, {entry.file_name: content})
    site.linked[f"/{entry.repo}/resolve/main/{entry.file_name}"] = hashlib.sha256(content).hexdigest()
    return site, content


def at_home(tmp_path: Path, site: Site) -> dict[str, str]:
    """Return variables of a user without models, whose hub is the stand-in."""
    home = {"HOME": str(tmp_path / "home"), "LLAMADO_CACHE": str(cache_dir()), "LLAMADO_DEMO_PORT": "0"}
    return home | {"HF_ENDPOINT": site.url, "NO_PROXY": "127.0.0.1"}


def check_answer(done: subprocess.CompletedProcess[str], name: str) -> None:
    """Check that a large model was downloaded and has answered."""
    assert done.returncode == 0, done.stdout + done.stderr
    words = " ".join(done.stdout.split())
    assert f"model: {LARGE[name].about} " in words and re.search(r"takes [\d.,]+ MiB of memory with 4096 tokens", words)
    assert "time to first token" in words


@pytest.mark.full
def test_a_large_model_from_the_hub_to_an_answer(run: Run, clone: Path, tmp_path: Path) -> None:
    site, content = stand_in(tmp_path, "qwen3", "qwen3moe")
    with serve(site):
        done = run("qwen3", **at_home(tmp_path, site))
    check_answer(done, "qwen3")
    assert (tmp_path / "home" / ".models" / LARGE["qwen3"].file_name).read_bytes() == content
    *_, server = commands(clone)
    assert server[server.index("--alias") + 1] == "qwen3"
    assert run("stop").stdout == "demo has stopped\n"


@pytest.mark.full
def test_a_download_that_broke_off_goes_on_and_is_kept(run: Run, clone: Path, tmp_path: Path) -> None:
    site, content = stand_in(tmp_path, "glm", "deepseek2")
    folder = tmp_path / "home" / ".models"
    with serve(site):
        variables = at_home(tmp_path, site)
        site.cut_after, site.cuts = 1 << 20, 100  # the connection breaks after 1 MiB in each attempt
        site.ranges = False
        script(tmp_path / "hasty" / "sitecustomize.py", "from llamado.gguf.sources import fetch\n\nfetch.PAUSE = 0.01")
        broken = run("glm", **variables, PYTHONPATH=f"{clone / 'src'}:{tmp_path / 'hasty'}")
        assert broken.returncode == 1 and "run the same command again, it resumes the download" in broken.stdout
        (part,) = folder.glob("*.part")
        site.cuts, site.ranges = 0, True
        site.asked.clear()
        done = run("glm", **variables, LATENCY1="1")
    check_answer(done, "glm")
    assert any(asked == f"bytes={1 << 20}-" for _, _, asked in site.asked), "the download is resumed"
    assert (folder / LARGE["glm"].file_name).read_bytes() == content and not part.exists()
    words = " ".join(done.stdout.split())
    assert "worker 1: 127.0.0.1:" in words and "link latency 1 ms" in words
    _, _, _, server = commands(clone)
    assert server[server.index("--alias") + 1] == "glm"
    assert run("stop").stdout == "demo has stopped\n"
    again = run("glm", **variables)  # from disk
    assert again.returncode == 0, again.stdout + again.stderr
    assert run("stop").stdout == "demo has stopped\n"


def test_large_model_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site, content = stand_in(tmp_path, "qwen3", "qwen3moe")
    monkeypatch.setattr(supported.limits, "memory", lambda: MachineMemory(1 << 20, 1 << 20, 1 << 40))
    monkeypatch.setenv("LLAMADO_MODELS", str(tmp_path / "models"))
    with serve(site):
        monkeypatch.setenv("HF_ENDPOINT", site.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        with pytest.raises(NotEnoughMemory, match=r"Q4_K_M\.gguf is not fetched: .*has 1\.0 MiB free"):
            demo.fetch("qwen3")
    assert sum(n for path, n in site.sent.items() if path.endswith(".gguf")) <= 1 << 20 < len(content)
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"WORKERS": "two"}, "WORKERS and LATENCY1, LATENCY2 …: expected numbers"),
        ({"LATENCY1": "20ms"}, "WORKERS and LATENCY1, LATENCY2 …: expected numbers"),
        ({"LATENCY2": "-1"}, "0 to 10,000 milliseconds"),
        ({"WORKERS": "-1"}, "WORKERS: expected 0 or more"),
        ({"LLAMADO_DEMO_PORT": "http"}, "LLAMADO_DEMO_PORT: expected a port, 0 to 65535"),
        ({"LLAMADO_DEMO_PORT": "65536"}, "LLAMADO_DEMO_PORT: expected a port, 0 to 65535"),
    ],
)
def test_invalid_variables(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variables: dict[str, str],
    said: str,
) -> None:
    (tmp_path / "x.gguf").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["demo", "x.gguf"])
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"LLAMADO_DEMO_PORT": "0"} | variables).items():
        monkeypatch.setenv(name, value)
    assert demo.main() == 1
    assert said in capsys.readouterr().out and not (tmp_path / ".demo").exists()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, [0, 0]),
        ({"WORKERS": "0"}, []),
        ({"WORKERS": "1"}, [0]),
        ({"WORKERS": "3"}, [0, 0, 0]),
        ({"LATENCY1": "20"}, [20, 0]),
        ({"LATENCY2": "30"}, [0, 30]),
        ({"LATENCY1": "20", "LATENCY2": "30.5"}, [20, 30.5]),
        ({"LATENCY3": "7"}, [0, 0, 7]),
        ({"WORKERS": "3", "LATENCY1": "20"}, [20, 0, 0]),
        ({"LATENCY1": "20", "WORKERS": "1"}, [20]),
        ({"LATENCY1": "", "WORKERS": ""}, [0, 0]),
    ],
)
def test_how_many_workers_and_how_slow(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: list[float]
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert demo.latencies() == expected


@pytest.mark.slow
def test_missing_file(run: Run) -> None:
    done = run("missing.gguf", LLAMADO_DEMO_PORT="0")
    assert done.returncode == 1 and "missing.gguf" in done.stdout and "Traceback" not in done.stdout + done.stderr


def test_python_is_too_old(run: Run, tmp_path: Path) -> None:
    for name in ("python", "python3", *(f"python3.{minor}" for minor in range(11, 15))):
        script(tmp_path / "bin" / name, "exit 1")
    done = run(PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert done.returncode == 1 and "Python 3.11 or newer is needed" in done.stderr


@pytest.mark.slow
def test_first_run_installs(run: Run, clone: Path, tmp_path: Path) -> None:
    """`.venv` is created. A failed installation explains what to do without a network, and is retried."""
    venv, log = clone / ".venv", tmp_path / "log"
    (venv / "bin" / "python").unlink()
    (venv / ".llamado-installed").unlink()
    # "python -m venv" creates one whose pip fails until the file "network" exists.
    made = f'echo "$*" >>{log}; test -e {tmp_path / "network"} || exit 1'
    inner = f'case "$*" in *"-m pip"*) {made} ;; *) echo "$*" ;; esac'
    script(tmp_path / "made", inner)
    new = f'mkdir -p "$4/bin"; cp {tmp_path / "made"} "$4/bin/python"; echo "$*" >>{log}'
    script(
        tmp_path / "python", f'case "$*" in *"-m venv"*) {new} ;; *) exec {shlex.quote(sys.executable)} "$@" ;; esac'
    )
    python = str(tmp_path / "python")
    done = run("missing.gguf", PYTHON=python)
    assert done.returncode == 1 and "PIP_FIND_LINKS=FOLDER ./demo.sh" in done.stderr
    (tmp_path / "network").touch()
    for _ in range(2):  # installed only once
        done = run("missing.gguf", PYTHON=python)
        assert "missing.gguf" in done.stdout and not done.stderr
    lines = log.read_text().splitlines()
    assert lines[0] == "-P -m venv .venv" and len(lines) == 3
    assert all(line.startswith("-P -m pip install ") and line.endswith(" -e .") for line in lines[1:])


@pytest.fixture
def python_log(clone: Path, tmp_path: Path) -> Path:
    """Replace the clone's Python by a script that logs its arguments; return the log."""
    script(clone / ".venv" / "bin" / "python", f'echo "$*" >>{tmp_path / "python_log"}')
    return tmp_path / "python_log"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "variables", "expected"),
    [
        ([], {}, "-m smollm2 --nodes 3,4,5 --latency 0,5,10,20,30"),
        (["glm", "-r", "1"], {"NODES": "3", "LATENCIES": "0,20"}, "-m glm --nodes 3 --latency 0,20 -r 1"),
    ],
)
def test_the_table_of_latencies(
    clone: Path, tmp_path: Path, python_log: Path, given: list[str], variables: dict[str, str], expected: str
) -> None:
    command = [str(clone / "bench.sh"), *given]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    words = python_log.read_text().split("bench ", 1)[1].strip()
    assert python_log.read_text() == f"-P -m llamado bench {words}\n" and words == expected
    flags, _ = parse(cli.make_parser("bench"), "bench", words.split())
    assert flags.nodes and flags.latency


def test_the_latency_proxy(clone: Path, tmp_path: Path, python_log: Path) -> None:
    """Uses the clone's `.venv`, else the llamado in PATH, else prints what to do."""
    flags = "--listen-port 60052 --target-port 50052 --latency-ms 20"

    def start() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(clone / "latency-proxy.py"), *flags.split()]
        path = {"PATH": str(tmp_path / "bin")}
        return subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True, timeout=60)

    script(tmp_path / "bin" / "llamado", f'echo "in PATH: $*" >>{python_log}')
    for expected in (f"-P -m llamado tap {flags}\n", f"in PATH: tap {flags}\n"):
        assert start().returncode == 0 and python_log.read_text() == expected
        python_log.unlink()
        (clone / ".venv" / "bin" / "python").unlink(missing_ok=True)
    (tmp_path / "bin" / "llamado").unlink()
    done = start()
    assert done.returncode == 1 and "./demo.sh install" in done.stderr and not python_log.exists()


@pytest.mark.slow
def test_install_only(run: Run, python_log: Path) -> None:
    done = run("install")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "") and not python_log.exists()
