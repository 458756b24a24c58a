#!/usr/bin/env bash
# Checks and tests, in an environment of its own (.venv). Further arguments go to pytest.
#
#   ./test.sh          all checks, and the tests of every run
#   ./test.sh fast     the same without the tests marked slow
#
# tests/full.sh runs the rest: every CPU, architecture and weight type, llama.cpp, browsers, real clients, Ray, Helm, ARM.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# Keep byte code: the tests start hundreds of processes, each of which would compile everything again.
unset PYTHONDONTWRITEBYTECODE
python="${PYTHON:-python3}"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
  echo "Python 3.11 or newer is needed; PYTHON=… names one" >&2
  exit 1
}
doing="the installation of packages"
trap 'echo "failed: $doing" >&2' ERR
step() {
  doing=$*
  printf '\n== %s\n' "$doing"
}

stamp=.venv/.llamado-installed-dev
if [ ! -x .venv/bin/python ] || [ pyproject.toml -nt "$stamp" ] || [ tests/constraints.txt -nt "$stamp" ]; then
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  # Only what is imported is compiled, when it is.
  .venv/bin/python -m pip install -qq --disable-pip-version-check --no-compile -c tests/constraints.txt -e '.[dev]' </dev/null
  touch "$stamp"
fi

marks="not full and not interop and not browser"
if [ "${1:-}" = "fast" ]; then
  marks="$marks and not slow"
  shift
fi

step "ruff check"
.venv/bin/ruff check .
step "ruff format"
.venv/bin/ruff format --check .
step "mypy"
.venv/bin/mypy --num-workers auto
step "lint-imports"
.venv/bin/lint-imports --no-logo
step "pytest"
printf '%s\n' \
  "************************************************************************" \
  "  SKIPPED here: other CPUs and architectures, the real llama.cpp, the" \
  "  page in a browser, real clients, Ray, Helm and ARM. tests/full.sh runs" \
  "  all of them, .ci/run a part." \
  "************************************************************************"
# Two files at a time more than there are cores: many tests wait for processes they started. In the order of tests/tiers.py:
# a file of few tests may take long, and should not start last. The last line is pytest's own summary.
workers=$(($(getconf _NPROCESSORS_ONLN) + 2))
exec .venv/bin/python -m pytest -q -m "$marks" -n "$workers" --dist loadfile --no-loadscope-reorder "$@" </dev/null
