"""Runs the tests on deliberate mistakes, which `mutations.txt` lists.

python tests/devices/cuda/mutations.py [TEXT …]    run those that contain a text, and print the table
"""

from __future__ import annotations

import os
import re
import resource
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

HERE = Path(__file__).parent
PACKAGE = HERE.parents[2] / "src" / "llamado" / "devices" / "cuda"


class Mutation(NamedTuple):
    """A text of a file, its replacement, and arguments of pytest that select the tests."""

    file: str
    old: str
    new: str
    tests: str


def mutations() -> Iterator[Mutation]:
    """Read the list."""
    file = tests = ""
    for number, text in enumerate((HERE / "mutations.txt").read_text().splitlines(), 1):
        if text.startswith("[") and text.endswith("]") and "=>" not in text:
            file, _, tests = text[1:-1].partition(": ")
        elif text and not text.startswith("#"):
            old, arrow, new = text.replace("\\n", "\n").partition("  =>  ")
            if not (arrow and tests):
                raise ValueError(f"line {number}: neither a heading nor a mistake")
            yield Mutation(file, old, new, tests)


# --- running them ----------------------------------------------------------------------------------------------------


class _Loader(SourceFileLoader):
    """Loads a mutated module; byte code is neither read nor written."""

    def __init__(self, name: str, path: str, mutation: Mutation) -> None:
        super().__init__(name, path)
        self._mutation = mutation

    def get_data(self, path: str) -> bytes:
        if path.endswith(".pyc"):
            raise OSError("mutated")
        return mutated(self._mutation).encode()

    def set_data(self, path: str, data: bytes, *, _mode: int = 0o666) -> None:
        pass


class _Finder(MetaPathFinder):
    """Finds the mutated module."""

    def __init__(self, mutation: Mutation) -> None:
        self._mutation = mutation
        self._name = "llamado.devices.cuda." + mutation.file.removesuffix(".py").replace("/", ".")

    def find_spec(self, name: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        file = str(PACKAGE / self._mutation.file)
        return spec_from_file_location(name, file, loader=_Loader(name, file, self._mutation))


def mutated(mutation: Mutation) -> str:
    """Return the text of the file with the mistake."""
    text = (PACKAGE / mutation.file).read_text()
    if text.count(mutation.old) != 1:
        raise ValueError(f"{mutation.old!r} occurs {text.count(mutation.old)} times in {mutation.file}")
    return text.replace(mutation.old, mutation.new)


_MOST_SECONDS = 120
"""Processor time of the tests of a mistake."""


class Outcome(NamedTuple):
    """The exit code of pytest, and its first line of an error."""

    code: int
    why: str

    @property
    def found(self) -> bool:
        """True if a test failed."""
        return self.code == 1


def outcome(tests: str, mutation: Mutation | None) -> Outcome:
    """Run tests in a child process."""
    with tempfile.TemporaryFile() as file:
        child = os.fork()
        if not child:
            code = 70
            try:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                code = _run(tests, mutation)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        file.seek(0)
        lines = file.read().decode(errors="replace").splitlines()
    errors = [line[1:].strip() for line in lines if line.startswith("E  ")] or lines[-1:]
    code = os.waitstatus_to_exitcode(status)
    return Outcome(1 if -code in (signal.SIGXCPU, signal.SIGKILL) else code, errors[0] if errors else "")


def _run(tests: str, mutation: Mutation | None) -> int:
    import pytest

    if mutation is not None:
        assert not any(name.startswith("llamado.devices.cuda") for name in sys.modules)
        sys.meta_path.insert(0, _Finder(mutation))
    resource.setrlimit(resource.RLIMIT_CPU, (_MOST_SECONDS, _MOST_SECONDS))  # a mistake may be a loop without an end
    arguments = [str(HERE / word) if word.endswith(".py") else word for word in shlex.split(tests)]
    return int(pytest.main(["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-o", "timeout=0", *arguments]))


def outcomes(mutations: Sequence[Mutation]) -> Iterator[tuple[Mutation, Outcome]]:
    """Run mutations, each tests first without: they must pass. A child of this process does not import all anew."""
    import conftest  # noqa: F401
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401

    passed: set[str] = set()
    for mutation in mutations:
        if mutation.tests not in passed:
            plain = outcome(mutation.tests, None)
            if plain.code:
                raise RuntimeError(f"{mutation.tests} fails without a mutation: {plain.why}")
            passed.add(mutation.tests)
        yield mutation, outcome(mutation.tests, mutation)


def line(mutation: Mutation, result: Outcome) -> str:
    """Return a line of the table."""
    word = "found" if result.found else "SURVIVED" if not result.code else f"ERROR {result.code}"
    shown = [" ".join(text.split())[:44] for text in (mutation.old, mutation.new)]
    return f"{word:9} {mutation.file:22} {shown[0]:44} → {shown[1]:44} {result.why[:90]}"


def main(arguments: Sequence[str]) -> None:
    """Print the table of the mistakes that contain one of the texts, or of each n-th one from number i on: `i/n`."""
    chosen = list(mutations())
    if arguments and (part := re.fullmatch(r"(\d+)/(\d+)", arguments[0])):
        chosen = chosen[int(part[1]) :: int(part[2])]
    elif arguments:
        chosen = [one for one in chosen if any(text in str(one) for text in arguments)]
    for mutation, its_outcome in outcomes(chosen):
        print(line(mutation, its_outcome), flush=True)


if __name__ == "__main__":
    sys.path[:0] = [str(folder) for folder in HERE.parents[1::-1]] + [str(HERE)]
    main(sys.argv[1:])
