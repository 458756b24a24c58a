#!/usr/bin/env bash
# Chat with a model in one command. Needs Python 3.11 or newer and nothing else.
#
#   ./demo.sh              the default model (SmolLM2 135M), divided among two workers and a server
#   ./demo.sh gemma3       Gemma 3 270M
#   ./demo.sh glm          GLM 4.7 Flash: 17 GB, fetched to ~/.models (LLAMADO_MODELS) if it fits memory
#   ./demo.sh qwen3        Qwen3 Coder 30B A3B: 18 GB, likewise
#   ./demo.sh PATH.gguf    a file of yours
#   ./demo.sh hf:user/model    a GGUF model from the Hugging Face hub
#   WORKERS=0 ./demo.sh    so many workers
#   LATENCY1=20 LATENCY2=30 ./demo.sh    links of 20 and 30 ms to the workers; LATENCY1 alone: to the first
#   LLAMADO_DEMO_PORT=9000 ./demo.sh     the server's port; 8080 unless said
#   ./demo.sh stop         end what a demo left running
#   ./demo.sh install      only make .venv, with llamado in it
#   PYTHON=…               the Python to make .venv with
set -euo pipefail
case "${1:-}" in /* | *:*) ;; *.gguf) set -- "$PWD/$1" ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")"

fail() { printf '%s\n' "$*" >&2; exit 1; }

case "${1:-}" in -h | --help) sed -n '2,16s/^# \{0,1\}//p' "${BASH_SOURCE[0]##*/}"; exit 0 ;; esac

if [ "${1:-}" = "stop" ] && [ ! -x .venv/bin/python ]; then
  echo "no demo is running"
  exit 0
fi

python=""
for candidate in "${PYTHON:-}" python3 python3.14 python3.13 python3.12 python3.11 python; do
  if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python=$candidate
    break
  fi
done
[ -n "$python" ] || fail "Python 3.11 or newer is needed (python.org, or your system's packages); PYTHON=… names one"
LLAMADO_DEMO_BEGAN=$("$python" -P -c 'import time; print(time.time())')
export LLAMADO_DEMO_BEGAN

extras=""
case "${1:-}" in hf:*) extras="[hub]" ;; esac
stamp=".venv/.llamado-installed$extras"
if [ ! -x .venv/bin/python ] || [ pyproject.toml -nt "$stamp" ]; then
  [ -x .venv/bin/python ] || "$python" -P -m venv .venv || fail "could not make .venv (on Debian and Ubuntu: apt install python3-venv)"
  echo "installing llamado into .venv (the first time this takes a minute)"
  .venv/bin/python -P -m pip install --quiet --disable-pip-version-check -e ".$extras" </dev/null ||
    fail "pip could not install llamado's dependencies: see the message above. Without a network: PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER ./demo.sh, with the wheels in FOLDER"
  touch "$stamp"
fi
if [ "${1:-}" = "install" ]; then exit 0; fi
exec .venv/bin/python -P -m llamado.commands.demo "$@"
