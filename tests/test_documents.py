"""The documents are true: each page is followed as a reader would, command by command.

A page's commands run in their order, in an empty folder; a server that a page starts answers what the page asks
afterwards. Nothing is left out silently: what cannot be run is in a table here, with the reason.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from documents import PAGES, ROOT, Block, anchors, blocks, links, spans, text_of, words
from parsers import parser_of
from PIL import Image
from projectors import spec
from projectors.siglip import GEMMA3
from tiny_models import make_gemma3
from waiting import GUARD, until

from llamado.cluster.deploy.deployment import Deployment
from llamado.cluster.deploy.targets import files_for
from llamado.cluster.file import read_cluster
from llamado.commands.cli import COMMANDS, PROGRAMS, split_server_flags
from llamado.commands.wait.wait import run_wait
from llamado.flags import FLAGS, parse
from llamado.gateway.options import read_config
from llamado.gguf.sources.resolve import cache_dir
from llamado.router.presets import read_presets
from llamado.router.swap_config import read_swap_config
from llamado.server.api.status import health_body
from llamado.server.state import ServerState

SHELL = ("bash", "sh")
ELSEWHERE = {
    "console": "tests/commands/test_terminal_sessions.py",
    "diff": "tests/test_contributing.py",
    "mermaid": "tests/test_architecture.py",
}
"""Languages that another test reads."""

NOT_RUN = {
    r"pip install ": ("it changes this environment", "tests/test_wheel.py"),
    r"(LATENCY\d=\d+ )*\./demo\.sh": ("it installs an environment of its own", "tests/commands/test_demo.py"),
    r"\./test\.sh|\.ci/run|tests/full\.sh": ("they run the tests", "test.sh"),
    r"\.venv/bin/pip install pre-commit": ("it changes the clone", ".pre-commit-config.yaml"),
    r"benchmarks/peer\.sh": ("it compiles llama.cpp for a quarter of an hour", "benchmarks/peer.sh"),
    r"tests/clients/run\.sh": ("it installs a dozen clients", "tests/clients/run.sh"),
    r"python3 -m venv|\. \.venv": ("it makes an environment", "tests/package.sh"),
    r"tests/package\.sh": ("it installs three environments", "tests/package.sh"),
    r"tests/cuda\.sh": ("it needs an NVIDIA card", "tests/cuda.sh"),
    r"tests/arm\.sh": ("it fetches an emulator and Python for ARM", "tests/arm.sh"),
    r"python benchmarks/\w+\.py|pytest -s -m interop": ("it measures for minutes", "benchmarks/README.md"),
    r"llamado up ray\.yaml": ("it needs a cluster of Ray's", "tests/on_ray/run.sh"),
    r"llamado (pull hf:|serve -hf ).*gemma-3": ("it fetches gigabytes", "tests/gguf/test_sources.py"),
    r"llamado doctor$": ("what it finds of this machine is no fault of ours", "tests/cluster/test_doctor_files.py"),
}
"""Commands that are not run here: why, and the file that does it instead, or that they name."""

TYPED = {"llamado run smollm2 -n 64": "Hello!\n"}
"""Input of commands that read from the terminal."""

EXIT_CODES = {
    ("docs/quickstart.md", "llamado doctor http://localhost:8080"): 1,  # nothing runs there by then
    ("docs/operations.md", "llamado doctor server.log"): 1,
}
"""Commands that find something wrong where their page shows them."""

ELSEWHERE_RUNNING = {"docs/cluster.md": ["llamado worker -p 50053"]}
"""Commands of other machines that the page does not repeat."""

LONG = ("serve", "worker", "tap", "gateway", "up")
"""Commands that go on until they are ended."""

HERE = "127.0.0.1"
MACHINES = {"192.168.1.20": HERE, "192.168.1.21": HERE, "192.168.1.22": HERE, "localhost": HERE, "0.0.0.0": HERE}
"""Machines of the documents that are mapped to this one; others are distinguished by their ports."""

READERS: dict[str, Callable[[Path], object]] = {
    "cluster.yaml": read_cluster,
    "ray.yaml": read_cluster,
    "gateway.yaml": lambda path: read_config(str(path)),
    "config.yaml": read_swap_config,
    "models.ini": read_presets,
    "probes.yaml": lambda path: check_probes(yaml.safe_load(path.read_text())),
}
"""Parsers of the files that the documents show."""

SAMPLES: dict[str, Callable[[], Any]] = {
    "docs/operations.md": lambda: json.loads(health_body(ServerState(loading_model="smollm2"))[1])
}
"""Sources of the JSON samples on a page."""


def check_probes(shown: dict[str, Any]) -> None:
    (text,) = files_for("kubernetes", Deployment(serve=("-m", "x"), name="x")).values()
    found = {one["kind"]: one for one in yaml.safe_load_all(text)}
    (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert shown == {name: container[name] for name in shown} and len(shown) == 3


class Ports:
    """A free port for each place of the documents."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, int], int] = {}

    def of(self, host: str, port: int) -> int:
        key = MACHINES.get(host, host), port
        if key not in self._of:
            with socket.socket() as one:
                one.bind((HERE, 0))
                self._of[key] = one.getsockname()[1]
        return self._of[key]

    def replaced(self, text: str) -> str:
        """The text with this machine's addresses and free ports for those it shows."""
        machine = r"((?:192\.168\.1|10\.0\.0)\.\d+|localhost|127\.0\.0\.1|0\.0\.0\.0)"
        text = text.replace("192.168.1.0/24", "127.0.0.0/8")
        text = re.sub(r"(?<=--rpc )\S+", lambda found: re.sub(rf"{machine}(?!:)\b", r"\1:50052", found[0]), text)
        text = re.sub(
            rf"--host {machine} --port (\d+)",
            lambda found: f"--host {HERE} --port {self.of(found[1], int(found[2]))}",
            text,
        )
        text = re.sub(rf"{machine}:(\d+)", lambda found: f"{HERE}:{self.of(found[1], int(found[2]))}", text)
        text = re.sub(machine, HERE, text)
        return re.sub(
            r"((?:^| )(?:-p|--port|--listen-port|--target-port)|^port:) (\d{4,5})\b",
            lambda found: f"{found[1]} {int(found[2]) if self.has(int(found[2])) else self.of(HERE, int(found[2]))}",
            text,
            flags=re.MULTILINE,
        )

    def has(self, port: int) -> bool:
        return port in self._of.values()


class Reader:
    """Follows a page in a folder of its own, with `llamado` and `python` in PATH, and ends what was started."""

    def __init__(self, folder: Path, page: str) -> None:
        self.page, self.ports = page, Ports()
        self.home, self.work, programs = (folder / name for name in ("home", "work", "bin"))
        for path in (self.home / "models", self.work, programs):
            path.mkdir(parents=True)
        self._program(programs / "llamado", f'exec "{sys.executable}" -P -m llamado "$@"')
        self._program(programs / "python", f'exec "{sys.executable}" "$@"')
        curl = shutil.which("curl")
        assert curl, "the documents use curl: apt-get install curl"
        self._program(programs / "curl", f'[ "$1" = -f ] && shift; exec "{curl}" -sS --fail-with-body "$@"')
        self.environment = os.environ | {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "HOME": str(self.home),
            "XDG_RUNTIME_DIR": str(folder),
            "LLAMADO_CACHE": str(cache_dir()),
        }
        self.running: dict[int, tuple[str, subprocess.Popen[bytes], Path]] = {}

    @staticmethod
    def _program(path: Path, text: str) -> None:
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def follow(self, block: Block) -> None:
        if block.language in SHELL:
            for command in block.commands():
                self.type(command, block.place)
        elif block.language == "python":
            self._run([sys.executable, "-c", self.ports.replaced(block.text)], block.text, block.place)
        elif block.language == "json":
            assert json.loads(block.text) == SAMPLES[self.page](), block.place
        else:
            path = self.work / block.file
            path.write_text(self.ports.replaced(block.text))
            READERS[block.file](path)

    def type(self, command: str, place: str) -> None:
        if why_not(command):
            return
        if variable := re.fullmatch(r"([A-Z_]+)=(\S+)", command):
            self.environment[variable[1]] = variable[2]
            return
        typed = self._with_ports(command)
        given = words(os.path.expandvars(typed))
        goes_on = given[0] == "llamado" and given[1] in LONG and "--list-devices" not in given
        if goes_on:
            self.end(self._port(given))  # as the page says: what answers there is to be ended first
        if goes_on and not {"--detach", "-d"} & {*given}:
            self._start(typed, given, f"{place}: {command}")
        else:
            self._run(["bash", "-e", "-o", "pipefail", "-c", typed], command, place)

    def _port(self, given: list[str]) -> int:
        """Return the port of a long-running command."""
        flags = flags_of(given)
        if given[1] == "up" and len(given) > 2 and given[2].endswith(".yaml"):
            return read_cluster(self.work / given[2]).port
        found: int = flags.listen_port if given[1] == "tap" else flags.port
        return found

    def _start(self, typed: str, given: list[str], shown: str) -> None:
        """Start what goes on, and wait until it is ready."""
        port = self._port(given)
        assert self.ports.has(port), f"{shown} would take a port that is not the test's"
        log = self.work / f".{port}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {typed}"], cwd=self.work, env=self.environment, stdin=subprocess.DEVNULL,
                stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
        self.running[port] = shown, process, log
        ready = self._listens if "--tls-cert" in given else self._answers
        assert ready(given[1], port, process), f"{shown}\n{log.read_text()}"
        if "--join" in given:
            until(lambda: "joined; " in log.read_text(), lambda: f"{shown}\n{log.read_text()}")

    def _answers(self, kind: str, port: int, process: subprocess.Popen[bytes]) -> bool:
        scheme = "tcp" if kind in ("worker", "tap") else "http"
        if not self._listens(kind, port, process):
            return False
        return run_wait(f"{scheme}://{HERE}:{port}", timeout=GUARD, interval=60.0) == 0 and process.poll() is None

    def _listens(self, kind: str, port: int, process: subprocess.Popen[bytes]) -> bool:
        def reachable() -> bool:
            with socket.socket() as one:
                return one.connect_ex((HERE, port)) == 0

        return until(lambda: process.poll() is not None or reachable()) and process.poll() is None

    def _with_ports(self, command: str) -> str:
        """A command on free ports, also where it names none because it means the usual ones."""
        command = self.ports.replaced(bare(command))
        given = words(command)
        if given[0] != "llamado" or given[1] not in LONG or "--list-devices" in given:
            return command
        if given[1] == "up" and any(word.endswith(".yaml") for word in given):  # the file says it
            return command
        usual = {"worker": ("-p", 50052), "tap": ("--listen-port", 60052)}.get(given[1], ("--port", 8080))
        names = {"-p", "--port", "--listen-port"}
        return command if names & {*given} else f"{command} {usual[0]} {self.ports.of(HERE, usual[1])}"

    def _run(self, command: list[str], shown: str, place: str) -> None:
        done = subprocess.run(
            command, cwd=self.work, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=GUARD, input=TYPED.get(bare(shown), ""),
        )  # fmt: skip
        logs = "".join(f"\n--- {name}\n{log.read_text()[-2000:]}" for name, _, log in self.running.values())
        expected = EXIT_CODES.get((self.page, bare(shown)), 0)
        assert done.returncode == expected, (
            f"{place}:\n{shown}\nexit code {done.returncode}\n{done.stdout[-4000:]}{logs}"
        )

    def end(self, port: int) -> None:
        """End what has a port, as Ctrl-C would."""
        if port not in self.running:
            return
        command, process, log = self.running.pop(port)
        alive = process.poll() is None
        if alive:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(GUARD)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        assert alive, f"{command} ended by itself:\n{log.read_text()}"

    def close(self) -> None:
        for port in [*self.running][::-1]:
            self.end(port)
        left = subprocess.run(["llamado", "ps", "--json"], env=self.environment, capture_output=True, text=True)
        assert json.loads(left.stdout) == [], f"{self.page} leaves running what it started"


def bare(command: str) -> str:
    """A command without the comment behind it."""
    return re.sub(r"\s+#.*$", "", command) if "\n" not in command else command


def why_not(command: str) -> str:
    """Why a command is not run; "" where it is."""
    for pattern, (reason, file) in NOT_RUN.items():
        if re.match(pattern, bare(command)):
            return f"{reason}: {file}"
    return ""


@cache
def options_of(command: str) -> frozenset[str]:
    return frozenset(parser_of(command)._option_string_actions)


def flags_of(given: list[str]) -> Any:
    """The flags of a command of llamado's, read by its own parser. Raises FlagError and SystemExit."""
    own, _ = split_server_flags(given[2:]) if given[1] in ("deploy", "up") else (given[2:], [])
    return parse(parser_of(given[1]), given[1], own, {})[0]


@pytest.fixture
def reader(tmp_path: Path, request: pytest.FixtureRequest, smollm2_path: Path) -> Iterator[Reader]:
    one = Reader(tmp_path, request.param)
    (one.home / "models" / "smollm2.gguf").symlink_to(smollm2_path)
    if one.page == "docs/media.md":
        make_gemma3(one.work / "gemma-3-4b-it-Q4_K_M.gguf", n_embd=64, n_layer=2, wtype="F32")
        spec.make(GEMMA3, one.work / "mmproj-model-f16.gguf")
        Image.new("RGB", (64, 48), "orange").save(one.work / "cat.jpg")
    try:
        yield one
    finally:
        subprocess.run(["llamado", "down"], env=one.environment, capture_output=True)
        for _, process, _ in one.running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def run_here(page: str) -> list[Block]:
    """The blocks of a page that are run in this file."""
    return [
        block
        for block in blocks(page)
        if block.language not in ELSEWHERE and not (page == "CONTRIBUTING.md" and block.language == "python")
    ]


# A page takes seconds to a minute; README's is what a newcomer follows first.
@pytest.mark.parametrize(
    "reader",
    [
        pytest.param(page, marks=pytest.mark.slow if page == "README.md" else pytest.mark.full)
        for page in PAGES
        if run_here(page)
    ],
    indirect=True,
)
def test_the_page_can_be_followed(reader: Reader) -> None:
    for command in ELSEWHERE_RUNNING.get(reader.page, []):
        reader.type(command, reader.page)
    for block in run_here(reader.page):
        reader.follow(block)
    reader.close()


# --- what needs no server ---------------------------------------------------------------------------------------------


def test_every_code_block_is_run_or_explained() -> None:
    for page in PAGES:
        for block in run_here(page):
            known = block.language in (*SHELL, "python") or (block.language == "json" and page in SAMPLES)
            assert known or block.file in READERS, f"{block.place}: no test runs {block.language or 'this block'}"
    for file in ELSEWHERE.values():
        assert (ROOT / file).exists()


@pytest.mark.slow
def test_skipped_commands_have_a_valid_reason() -> None:
    shown = [command for page in PAGES for b in blocks(page) if b.language in SHELL for command in b.commands()]
    commands = [bare(command) for command in shown]
    for pattern, (_, file) in NOT_RUN.items():
        assert any(re.match(pattern, command) for command in commands), f"no page has {pattern}"
        assert (ROOT / file).exists(), file
    for command in commands:
        for name in re.findall(r"(?:benchmarks|tests|\.ci)/[\w./]+|\./\w+\.sh", command) if why_not(command) else ():
            assert (ROOT / name).exists(), command
    assert {*TYPED, *(command for _, command in EXIT_CODES)} <= {*commands} and {*ELSEWHERE_RUNNING} <= {*PAGES}


@pytest.mark.slow
def test_flags_exist_wherever_a_command_is_shown() -> None:
    """In blocks by the parser itself; in prose, where values are left out, by their names."""
    for page in PAGES:
        for block in blocks(page):
            for command in block.commands() if block.language in SHELL else ():
                given = words(command)
                if given[:1] == ["llamado"] and given[1:2] != ["--version"]:
                    flags_of(given)
        for span in spans(page):
            given = re.split(r"\s#|;|\||\$\(", span)[0].split()
            if given[0] != "llamado" or len(given) < 2 or not given[1].islower() or given[1] == "--version":
                continue
            command = PROGRAMS.get(given[1], given[1])
            assert command in COMMANDS, f"{page}: {span}"
            known = options_of(command) | {"--"}
            for word in split_server_flags(given[2:])[0]:
                assert not re.match(r"--?[a-z]", word) or word.partition("=")[0] in known, f"{page}: {span}"


@pytest.mark.slow
def test_flags_named_in_prose_exist() -> None:
    ours = {name for flag in FLAGS for name in (*flag.names, *flag.off_names)}
    ours |= {name for command in COMMANDS for name in options_of(command)}
    scripts = "".join(path.read_text() for path in (ROOT / "benchmarks").glob("*.py"))
    of_scripts = {*re.findall(r'add_argument\("(--[\w-]+)"', scripts)}
    for page in PAGES:
        for span in spans(page):
            if re.match(r"--?[a-z]", span):
                name = span.partition("=")[0].split()[0].rstrip(",")
                known = ours | (of_scripts if page.startswith("benchmarks/") else set())
                assert fnmatch.filter(known, name), f"{page}: {span}"


def test_variables_named_in_prose_exist() -> None:
    sources = [*(ROOT / "src").rglob("*.py"), ROOT / "demo.sh", ROOT / "tests/conftest.py"]
    known = {*re.findall(r"\b[A-Z]+_[A-Z_]*\d?", "".join(path.read_text() for path in sources))}
    for page in PAGES:
        for name in re.findall(r"`\$?((?:LLAMADO|LLAMA|GGML)_[A-Z_]+\d?)\b", text_of(page)):
            assert name in known or name.rstrip("_").endswith("ARG"), f"{page}: {name}"


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for link in links(page):
            path, _, anchor = link.partition("#")
            target = (ROOT / page).parent / path if path else ROOT / page
            assert target.exists(), f"{page}: {link}"
            if anchor:
                assert anchor in anchors(os.path.relpath(target, ROOT)), f"{page}: {link}"


def test_every_page_is_linked() -> None:
    led = {
        os.path.normpath(os.path.join(os.path.dirname(page), link.partition("#")[0]))
        for page in PAGES
        for link in links(page)
    }
    assert not {page for page in PAGES if page != "README.md"} - led


@pytest.mark.full
@pytest.mark.skipif(find_spec("material") is None, reason="the site needs pip install '.[full]'")
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "operations.html").exists()
