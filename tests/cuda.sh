#!/usr/bin/env bash
# Everything on a machine with an NVIDIA card, in one go of about eight minutes: device tests on the card against the
# CPU's bits, whole models, lost cards, and speed beside llama.cpp's.
#
#   tests/cuda.sh [--wheels DIR] [--llama-bench PATH | --llama-source DIR] [--models "NAME …"] [--out DIR]
#   tests/cuda.sh --download DIR   on a machine with a network: get the wheels for the other one
#   tests/cuda.sh --fake           try it out where there is no card: an emulated one, small sizes, this tree's .venv
#
# The machine has the driver and Python 3.12 with numpy and llvmlite. All else comes from the wheels (default: wheels/
# beside the tree). llama.cpp is measured if its llama-bench, built with -DGGML_CUDA=ON, is named, or its sources, which
# cmake and nvcc compile meanwhile. Reports go to --out (default: $OUT, or cuda-report/).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tests/steps.sh

wheels=../wheels bench="" source="" models="" out="${OUT:-cuda-report}" download="" fake=""
while [ $# -gt 0 ]; do
  case $1 in
  --wheels) wheels=$2 ;;
  --llama-bench) bench=$2 ;;
  --llama-source) source=$2 ;;
  --models) models=$2 ;;
  --out) out=$2 ;;
  --download) download=$2 ;;
  --fake) fake=--fake && shift && continue ;;
  *) echo "unknown: $1" >&2 && exit 2 ;;
  esac
  shift 2
done

# What the tests import, besides what a user installs.
packages() {
  "$1" - <<'PYTHON'
import tomllib
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extra = ("pytest", "hypothesis", "gguf")
print(*project["dependencies"], *(one for one in project["optional-dependencies"]["dev"] if one.startswith(extra)), sep="\n")
PYTHON
}

if [ -n "$download" ]; then
  mkdir -p "$download"
  packages python3 | grep -vE '^(numpy|llvmlite)' >"$download/packages.txt"
  # shellcheck disable=SC2046
  python3 -m pip download --quiet --disable-pip-version-check --only-binary :all: --python-version 3.12 \
    $(printf -- '--platform manylinux_2_%d_x86_64 ' {17..35}) --platform manylinux2014_x86_64 \
    -d "$download" -r "$download/packages.txt"
  rm -f "$download"/numpy-* "$download"/llvmlite-*
  du -sh "$download"
  exit
fi

mkdir -p "$out"
exec > >(tee "$out/log.txt") 2>&1
python=.venv/bin/python
if [ -z "$fake" ]; then
  # Not an environment of its own: that of python3 may have numpy and llvmlite, and be one itself.
  python=python3 site=$PWD/.venv-cuda
  if [ ! -d "$site" ]; then
    python3 -m pip install -qq --disable-pip-version-check --no-deps --no-index --target "$site" "$wheels"/*.whl
    mkdir -p "$site/bin"
    printf '#!/bin/sh\nexec python3 -m llamado "$@"\n' >"$site/bin/llamado"
    chmod +x "$site/bin/llamado"
  fi
  export LLAMADO_TEST_CUDA=real HF_HUB_OFFLINE=1 PATH=$site/bin:$PATH
  nvidia-smi || true
fi
export PYTHONPATH=$PWD/src${site:+:$site}
pytest=("$python" -m pytest -q -p no:cacheprovider)

build=""
if [ -n "$source" ]; then
  "$python" benchmarks/cuda.py --build "$source" >"$out/llama-build.txt" 2>&1 &
  build=$!
fi
workers=$(($(getconf _NPROCESSORS_ONLN) < 12 ? $(getconf _NPROCESSORS_ONLN) : 12))
if [ -z "$fake" ]; then
  step 60 "the driver" "${pytest[@]}" tests/devices/cuda/test_cuda_card.py
  step 150 "operations on the card, with the CPU's bits" "${pytest[@]}" tests/devices --ignore tests/devices/cuda -k cuda \
    -m "not interop" -n "$workers"
  # shellcheck disable=SC2086
  step 120 "whole models on the card" "$python" tests/devices/cuda/on_a_card.py $models
else
  step 170 "operations on the card, with the CPU's bits" "${pytest[@]}" tests/devices/test_copies.py -k cuda
  step 120 "whole models on the card" "$python" tests/devices/cuda/on_a_card.py --fake --prompts 2 --tokens 4
fi
if [ -n "$build" ]; then
  wait "$build" || true
  bench=$source/build-cuda/bin/llama-bench
fi
if [ -n "$bench" ] && [ ! -x "$bench" ]; then
  echo "LEFT OUT: llama.cpp: $bench was not built, see $out/llama-build.txt" && bench=""
fi
mkdir -p "$out/models"
PYTHONPATH=$PYTHONPATH:tests "$python" -c "import sys, tiny_models; from pathlib import Path
tiny_models.make_llama(Path(sys.argv[1]), n_vocab=128256)" "$out/models/vocabulary.gguf"
options=(--json "$out/cuda.json" --folder "$out/models" --vocabulary-from "$out/models/vocabulary.gguf")
[ -z "$bench" ] || options+=(--bench "$bench")
step 260 "speed" "$python" benchmarks/cuda.py ${fake:+--fake} "${options[@]}" --seconds 200
rm -rf "$out/models"
finish
