"""Other processes of ours import nothing from the working directory; hints name what installs here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from tiers import chosen

from llamado import installation
from llamado.installation import install_command

SOURCES = Path(installation.__file__).parent
ROOT = SOURCES.parents[1]

# Each starts one of our processes and waits until it has imported what it needs.
_STARTS = {
    "a model of the router": """
        import subprocess
        from llamado.commands.cli import make_parser
        from llamado.router import catalog
        from llamado.flags import parse
        flags, _ = parse(make_parser("serve"), "serve", ["-m", "a.gguf", "-m", "b.gguf"])
        for model in catalog.load(flags).models.values():
            subprocess.run([*model.launch.args, "--help"], check=True)
    """,
    "the watchdog of processes": """
        from llamado.processes.guarded import Watchdog
        from pathlib import Path
        watchdog = Watchdog(0.1, Path("no-such-folder"))
        watchdog.start()
        watchdog.end()
    """,
    "a cluster in the background": """
        import os, tempfile
        from llamado.commands.up.start import UpError, start_in_background
        os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp()
        try:
            start_in_background("demo", ["--help"], [])
        except UpError as ended:
            assert "usage: llamado up" in str(ended), ended
    """,
    "workers of the bench": """
        from llamado.commands.bench.latency import own_workers
        with own_workers(1):
            pass
    """,
    "taps": """
        from llamado.cluster.taps import Taps
        from llamado.rpc.endpoint import Endpoint
        Taps([Endpoint("127.0.0.1", 1)]).close()
    """,
    "pip's settings": """
        from llamado.gguf.sources.index import _pip_config_list
        _pip_config_list()
    """,
}
_TAKEN = (
    "llamado",
    "regex",
    "json",
    "socket",
    "random",
    "pickle",
    "signal",
    "threading",
    "runpy",
    "pip",
    "numpy",
    "string",
)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder of modules that leave a mark when they are imported."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name in _TAKEN:
        mark = tmp_path / "imported"
        (folder / f"{name}.py").write_text(f"open({str(mark)!r}, 'a').write({name!r} + ' ')\nraise SystemExit(9)\n")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("start", chosen(_STARTS, ["the watchdog of processes", "taps"]))
def test_nothing_in_the_working_directory_is_imported(hostile: Path, start: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    script = "\n".join(line[8:] for line in _STARTS[start].splitlines())
    command = [sys.executable, "-P", "-c", script]
    done = subprocess.run(command, cwd=hostile, env=environment, capture_output=True, text=True, timeout=120)
    mark = hostile.parent / "imported"
    assert not mark.exists(), mark.read_text()
    assert done.returncode == 0, done.stderr


def test_python_is_started_in_one_way() -> None:
    """Only `python_command` names this Python; multiprocessing would start one without `-P`."""
    for path in SOURCES.rglob("*.py"):
        text = path.read_text()
        assert path == Path(installation.__file__) or "sys.executable" not in text, path
        assert not re.search(r"^\s*(import|from) multiprocessing", text, re.MULTILINE), path


class Distribution:
    """An installed llamado of this direct_url.json."""

    def __init__(self, url: Any) -> None:
        self._url = url

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self._url is None else json.dumps(self._url)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A virtual environment with pip, and llamado from an index in it."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    monkeypatch.setattr(sys, "executable", "/venv/bin/python")
    monkeypatch.setattr(installation.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(metadata, "distribution", lambda name: Distribution(None))
    declared = ["httpx<1,>=0.27", "matplotlib<4,>=3.8; extra == 'plot'", 'pytest>=8.2; extra == "dev"']
    monkeypatch.setattr(metadata, "requires", lambda name: declared)
    return monkeypatch


def test_an_extra_in_a_virtual_environment(environment: pytest.MonkeyPatch) -> None:
    expected = "/venv/bin/python -m pip install 'matplotlib<4,>=3.8'"
    assert install_command("plot") == expected
    # A wheel, a folder or a repository that may be gone: the packages are named all the same.
    for url in ({"url": "file:///x/llamado.whl", "archive_info": {}}, {"url": "file:///clone", "dir_info": {}}):
        environment.setattr(metadata, "distribution", lambda name, url=url: Distribution(url))
        assert install_command("plot") == expected


def test_an_extra_in_a_clone(environment: pytest.MonkeyPatch) -> None:
    url = {"url": "file:///home/me/my%20clone", "dir_info": {"editable": True}}
    environment.setattr(metadata, "distribution", lambda name: Distribution(url))
    assert install_command("plot") == "/venv/bin/python -m pip install -e '/home/me/my clone[plot]'"


def test_an_extra_of_pipx_and_of_uv(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.setattr(installation.importlib.util, "find_spec", lambda name: None)
    assert install_command("plot") == "uv pip install --python /venv/bin/python 'matplotlib<4,>=3.8'"
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "pipx_metadata.json").write_text("{}")
    assert install_command("plot") == "pipx inject venv 'matplotlib<4,>=3.8'"


def test_an_extra_of_a_clone_that_is_not_installed(environment: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    environment.setattr(metadata, "distribution", missing)
    environment.setattr(metadata, "requires", missing)
    clone = SOURCES.parents[1]
    assert install_command("hub") == f"/venv/bin/python -m pip install -e '{clone}[hub]'"


def test_an_extra_where_the_system_keeps_its_own_packages(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.setattr(sys, "base_prefix", sys.prefix)
    environment.setattr(installation.sysconfig, "get_path", lambda name: str(tmp_path))
    assert install_command("plot") == "/venv/bin/python -m pip install 'matplotlib<4,>=3.8'"
    (tmp_path / "EXTERNALLY-MANAGED").touch()
    assert install_command("plot") == "/venv/bin/python -m pip install --break-system-packages 'matplotlib<4,>=3.8'"
    environment.setattr(sys, "base_prefix", "/usr")  # a virtual environment above it is its user's own
    assert "--break-system-packages" not in install_command("plot")


def test_an_extra_on_windows(environment: pytest.MonkeyPatch) -> None:
    environment.setattr(sys, "platform", "win32")
    environment.setattr(sys, "executable", "C:\\My Python\\python.exe")
    assert install_command("plot") == '"C:\\My Python\\python.exe" -m pip install "matplotlib<4,>=3.8"'


def test_the_package_declares_the_extras_that_hints_name() -> None:
    named = {
        extra
        for path in SOURCES.rglob("*.py")
        for extra in re.findall(r"""install_command\(["'](\w+)["']\)""", path.read_text())
    }
    assert named == {"cluster", "discovery", "hub", "mcp", "otel", "plot", "ray"}
    assert named <= tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()


def test_hints_are_made_in_one_place() -> None:
    """Hints name the packages themselves, because `pip install 'llamado[extra]'` needs llamado in an index."""
    for path in SOURCES.rglob("*.py"):
        if path != Path(installation.__file__):
            # containers.py writes recipes for images, which are built in a clone.
            assert path.name == "containers.py" or not re.search(r"pip install|llamado\[", path.read_text()), path
