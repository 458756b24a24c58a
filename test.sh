#!/usr/bin/env bash
# Every check and test, in an environment of its own (.venv). Arguments go to pytest.
#
#   ./test.sh          all checks and tests
#   ./test.sh fast     without the tests marked slow
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# Byte code is kept: the tests start hundreds of processes, each of which would compile everything anew.
unset PYTHONDONTWRITEBYTECODE
python="${PYTHON:-python3}"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
  echo "Python 3.11 or newer is needed; PYTHON=… names one" >&2
  exit 1
}
stamp=.venv/.llamado-installed-dev
if [ ! -x .venv/bin/python ] || [ pyproject.toml -nt "$stamp" ]; then
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' </dev/null
  touch "$stamp"
fi

marks="not interop and not browser"
if [ "${1:-}" = "fast" ]; then
  marks="not interop and not browser and not slow"
  shift
fi

step() { printf '\n== %s\n' "$*"; }

step "ruff check"
.venv/bin/ruff check .
step "ruff format"
.venv/bin/ruff format --check .
step "mypy"
.venv/bin/mypy
step "lint-imports"
.venv/bin/lint-imports --no-logo
step "pytest"
printf '%s\n' \
  "************************************************************************" \
  "  Tests against the real llama.cpp, of the page in a browser, of real" \
  "  clients, of clusters on Ray and of Helm's own rendering are SKIPPED" \
  "  here: .ci/run installs all of them and runs them." \
  "************************************************************************"
# Two files at a time: many tests wait for processes they started. In the order of their names: a file of few tests may
# be a long one, which should not come last. The last line is pytest's own summary.
exec .venv/bin/python -m pytest -q -m "$marks" -n 2 --dist loadfile --no-loadscope-reorder "$@" </dev/null
