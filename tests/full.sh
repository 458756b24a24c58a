#!/usr/bin/env bash
# Everything .ci/run leaves out: every lowering, architecture and weight type, older CPUs, all comparisons with llama.cpp,
# the whole page, real clients, three installers, Helm, Ray and ARM. About an hour and a half on two cores.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tests/steps.sh

# Programs that check what `llamado deploy` writes; without them those tests are skipped, and say so.
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! { command -v promtool && command -v nginx && command -v systemd-analyze; } >/dev/null; then
  apt-get update -qq && apt-get install -y -qq --no-install-recommends nginx-light prometheus systemd || true
fi
tests "checks and tests" ./test.sh
step "packages of the tests below" .venv/bin/python -m pip install -qq --disable-pip-version-check -c tests/constraints.txt -e '.[full]'
for cpu in avx2 avx512; do
  LLAMADO_CPU=$cpu tests "the quick tests on a CPU of $cpu" "${pytest[@]}" -n 2 --dist loadfile \
    -m "not full and not interop and not browser and not slow"
done
tests "the long tests" "${pytest[@]}" -m "full and not interop and not browser" -n 2 --dist loadfile \
  -o timeout=1200
step "the real llama.cpp" benchmarks/peer.sh
tests "against the real llama.cpp" "${pytest[@]}" -m "interop and not browser" -n 2 --dist loadfile \
  -o timeout=1200 tests
tests "the page in a browser" tests/page/run.sh full
step "the package by three installers" tests/package.sh
step "real clients" tests/clients/run.sh
# Helm itself, as a library (75 MB, not for every processor): it renders the chart of `llamado deploy helm`.
if .venv/bin/python -m pip install -qq --disable-pip-version-check --only-binary :all: 'helm-python-sdk>=0.2,<0.3' </dev/null; then
  tests "Helm" "${pytest[@]}" tests/cluster/test_helm.py
fi
step "clusters on Ray" tests/on_ray/run.sh
step "devices on ARM" tests/arm.sh
finish
