#!/usr/bin/env bash
# Installs a program to compare with, compiled for this machine, and prints the folder of its executables. `peer.py` has the
# details: peer.sh [llama.cpp | ik_llama.cpp]
set -euo pipefail
folder="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
python="${PYTHON:-python3}"
if [ -x "$folder/../.venv/bin/python" ] && [ -z "${PYTHON:-}" ]; then
  python="$folder/../.venv/bin/python"
fi
exec "$python" "$folder/peer.py" "$@"
