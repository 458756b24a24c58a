"""The built wheel: what is in it, and that it runs with the packages it declares and no others."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager
from packaging.requirements import Requirement
from tiers import chosen
from tiny_models import make_llama

from llamado import __version__

pytestmark = pytest.mark.slow
CLONE = Path(__file__).parents[1]

# Refuses what the wheel does not declare, then imports all modules of the package or runs a command of it.
_RUN = """
import importlib, pkgutil, sys
refused, site, *arguments = sys.argv[1:]

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused.split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
import llamado
assert llamado.__file__.startswith(site), llamado.__file__
if arguments:
    from llamado.commands.cli import main
    sys.argv = ["llamado", *arguments]
    raise SystemExit(main())
for module in pkgutil.walk_packages(llamado.__path__, "llamado."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:  # what only llamado[mcp] brings, where only it is used
        if not module.name.startswith("llamado.tools.mcp.") or error.name.partition(".")[0] not in ("mcp", "httpx2"):
            raise
    print(module.name)
"""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(requirements: list[str]) -> set[str]:
    """Distributions that requirements bring along, their own requirements included."""
    found: set[str] = set()
    todo = [(Requirement(text), "") for text in requirements]
    seen: set[tuple[str, str]] = set()
    while todo:
        requirement, extra = todo.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = normal(requirement.name)
        found.add(name)
        for wanted in ("", *requirement.extras):
            if (name, wanted) not in seen:
                seen.add((name, wanted))
                todo += [(Requirement(text), wanted) for text in metadata.requires(name) or []]
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=CLONE, check=True, timeout=120)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@cache
def refused() -> str:
    """Modules of packages that the wheel does not declare."""
    declared = tomllib.loads((CLONE / "pyproject.toml").read_text())["project"]["dependencies"]
    kept = needed(declared) | {"llamado", "pip"}
    found = {
        module
        for module, names in metadata.packages_distributions().items()
        if not kept & {normal(name) for name in names}
    }
    # Otherwise nothing would be shown.
    assert {"gguf", "hypothesis", "pytest", "huggingface_hub", "matplotlib", "trustme"} <= found
    assert not {"numpy", "httptools", "jinja2", "orjson", "yaml"} & found
    return ",".join(sorted(found))


def run(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command of the wheel's package, or without arguments the import of all its modules."""
    return subprocess.run(
        [sys.executable, "-P", "-c", _RUN, refused(), str(site), *arguments],
        cwd=site,
        env={"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin", "HOME": str(Path.home())},
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )


def test_contents_of_the_wheel(wheel: Path) -> None:
    assert wheel.name == f"llamado-{__version__}-py3-none-any.whl"
    sources = CLONE / "src"
    expected = {str(path.relative_to(sources)) for path in (sources / "llamado").rglob("*.py")} | {"llamado/py.typed"}
    expected |= {
        str(path.relative_to(sources)) for path in (sources / "llamado/page/built").rglob("*") if path.is_file()
    }
    if (CLONE / ".git").exists():
        expected.add("llamado/commit.txt")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"llamado-{__version__}.dist-info"
        points = archive.read(f"{info}/entry_points.txt").decode()
        told = archive.read(f"{info}/METADATA").decode()
    assert {name for name in names if not name.startswith(info)} == expected
    assert points.split() == ["[console_scripts]", "llamado", "=", "llamado.__main__:main"]
    assert "Requires-Python: >=3.11\n" in told and f"\nVersion: {__version__}\n" in told
    for extra in ("hub", "otel", "plot"):
        assert f"Provides-Extra: {extra}\n" in told
    assert {f"{info}/licenses/LICENSE", f"{info}/licenses/web/LICENSES.txt"} <= names


@pytest.mark.full
def test_all_modules_are_imported(site: Path) -> None:
    done = run(site)
    assert done.returncode == 0, done.stderr
    assert {
        "llamado.commands.cli",
        "llamado.router.serve",
        "llamado.rpc.worker.server",
        "llamado.commands.demo",
    } <= set(done.stdout.split())


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--help"], "llamado serve -m MODEL"),
        (["serve", "--help"], "--ctx-size"),
        (["--version"], __version__),
        (["inspect", "@model"], "general.architecture"),
        (["pull", "@model"], "tiny.gguf"),
        (["plan", "-m", "@model"], "tiny"),
        (["bench", "-m", "@model", "-p", "4", "-n", "2", "-r", "1"], "| tg2 |"),
        (["run", "-m", "@model", "-p", "Hello", "-n", "2"], ""),
    ],
)
def test_commands_run(site: Path, tmp_path: Path, arguments: list[str], said: str) -> None:
    model = make_llama(tmp_path / "tiny.gguf")
    done = run(site, *(str(model) if argument == "@model" else argument for argument in arguments))
    assert done.returncode == 0, done.stderr
    assert said in done.stdout and "Traceback" not in done.stderr


HINTS = {
    "bench -m @model --latency 0 --nodes 2 --out out": ('the extra "plot"', "matplotlib"),
    "cluster init --out keys": ("cryptography is missing", "install"),
    "pull hf:owner/missing": ('the extra "hub"',),
}


@pytest.mark.parametrize("command", chosen(HINTS, ["cluster init --out keys"]))
def test_hints_name_the_extra_for_a_missing_package(site: Path, tmp_path: Path, command: str) -> None:
    model = make_llama(tmp_path / "tiny.gguf")
    words = {"@model": str(model), "out": str(tmp_path), "keys": str(tmp_path / "keys")}
    done = run(site, *(words.get(word, word) for word in command.split()))
    assert done.returncode == 1 and all(hint in done.stderr for hint in HINTS[command])


def test_readme_on_a_package_index() -> None:
    """Links of the README lead somewhere without the files beside it, or say what they mean."""
    spec = importlib.util.spec_from_file_location("hatch_build", CLONE / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    text = "![a page](docs/a.png) [Guide](docs/b.md#top), [b.md](b.md), [there](https://example.org/x), [here](#here)"
    assert hook.for_an_index(text, "https://example.org/o/llamado") == (
        "![a page](https://example.org/o/llamado/raw/main/docs/a.png) "
        "[Guide](https://example.org/o/llamado/blob/main/docs/b.md#top), "
        "[b.md](https://example.org/o/llamado/blob/main/b.md), [there](https://example.org/x), [here](#here)"
    )
    assert hook.for_an_index(text, "") == " Guide (`docs/b.md`), b.md, [there](https://example.org/x), [here](#here)"
    for repository in ("", "https://example.org/o/llamado/"):
        made = ProjectMetadata(str(CLONE), PluginManager(), tomllib.loads(changed(repository))).core
        leads = re.findall(r"\]\(([^)]+)\)", made.readme)
        assert bool(leads) == bool(repository) and all(link.startswith(("https://", "#")) for link in leads)
        assert set(made.urls) == ({"Source", "Documentation", "Changelog", "Issues"} if repository else set())
        for link in [*leads, *made.urls.values()]:
            if path := re.match(r"https://example.org/o/llamado/(?:blob|raw)/main/([^#]+)", link):
                assert (CLONE / path[1]).exists(), link


def changed(repository: str) -> str:
    """pyproject.toml with an address of the sources."""
    text = (CLONE / "pyproject.toml").read_text()
    shown = re.sub(r'^repository = ".*"$', f'repository = "{repository}"', text, flags=re.MULTILINE)
    assert f'repository = "{repository}"' in shown
    return shown


def test_the_licences_of_the_page_are_those_of_its_packages() -> None:
    locked = json.loads((CLONE / "web/package-lock.json").read_text())["packages"]
    used = {
        f"{path.rpartition('node_modules/')[2]} {package['version']}"
        for path, package in locked.items()
        if path and not {"dev", "optional", "devOptional"} & package.keys()
    }
    told = re.findall(r"^([@\w/.-]+ \d[\w.-]*): \S", (CLONE / "web/LICENSES.txt").read_text(), re.MULTILINE)
    assert set(told) == used, "run: cd web && npm ci && node licenses.mjs"
