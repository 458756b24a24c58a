#!/usr/bin/env bash
# Tests of devices on 64-bit ARM, emulated: with Debian's qemu, its Python for arm64 and PyPI's wheels for it. What they
# compute is compared, bit by bit, with what this machine computes: one cluster may have both. Arguments go to pytest and
# replace the tests below.
#
# What is fetched (400 MB) and what is compiled for ARM lie in the user's cache folder. Where Debian's packages or PyPI
# cannot be reached nothing is tested, and the last line says so.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

skip() {
  printf '%s\n' "************************************************************************" \
    "  ARM is NOT tested: $1" "************************************************************************"
  exit 0
}
[ "$(uname -sm)" = "Linux x86_64" ] || skip "qemu and the numbers to compare with are fetched for x86-64 on Linux"
command -v apt-get dpkg >/dev/null || skip "Debian's packages need apt-get and dpkg"
keys=/usr/share/keyrings/debian-archive-keyring.gpg
[ -e "$keys" ] || skip "$keys is missing: install debian-archive-keyring"

arm="${LLAMADO_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/llamado}/arm"
python="$PWD/.venv/bin/python"
versions="$("$python" -m pip --disable-pip-version-check freeze | grep -iE \
  '^(numpy|llvmlite|pytest|pytest-timeout|hypothesis|sortedcontainers|iniconfig|packaging|pluggy|pygments|regex|jinja2|markupsafe|orjson|pyyaml|gguf|tqdm|requests|httpx|httpcore|h11|anyio|idna|certifi|sniffio|typing_extensions)==')"
debian="python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 libgcc-s1 libstdc++6 zlib1g libexpat1 libssl3 libffi8
  libbz2-1.0 liblzma5 libsqlite3-0 libuuid1 libcrypt1"

packages() { # Debian's: by an apt of its own, so that this machine's is left as it is
  rm -rf "$arm/apt" "$arm/debs" "$arm/root" "$arm/qemu" && mkdir -p "$arm/apt/lists/partial" "$arm/apt/cache/archives/partial" "$arm/debs"
  echo "deb [signed-by=$keys] http://deb.debian.org/debian bookworm main" >"$arm/apt/sources.list"
  cat >"$arm/apt/apt.conf" <<-END
	Dir::State "$arm/apt"; Dir::State::Lists "lists"; Dir::State::status "/dev/null"; Dir::Cache "$arm/apt/cache";
	Dir::Etc::SourceList "$arm/apt/sources.list"; Dir::Etc::SourceParts "/dev/null"; Dir::Etc::Parts "/dev/null";
	APT::Architecture "amd64"; APT::Architectures { "amd64"; "arm64"; }; APT::Sandbox::User ""; Acquire::Languages "none";
	END
  (cd "$arm/debs" && export APT_CONFIG="$arm/apt/apt.conf" && apt-get -qq update &&
    apt-get -qq download qemu-user-static:amd64 $(printf '%s:arm64 ' $debian)) || return 1
  for package in "$arm"/debs/*_arm64.deb; do dpkg -x "$package" "$arm/root"; done
  dpkg -x "$arm"/debs/qemu-user-static_*.deb "$arm/qemu" && rm -rf "$arm/debs" "$arm/apt/lists"
}
wheels() {
  rm -rf "$arm/site"
  "$python" -m pip install -qq --disable-pip-version-check --no-deps --no-compile --target "$arm/site" --only-binary :all: \
    $(printf -- '--platform manylinux_2_%s_aarch64 ' 17 24 26 27 28 31 34) --platform manylinux2014_aarch64 \
    --python-version 3.11 --implementation cp --abi cp311 --abi abi3 --abi none $versions </dev/null
}
fetched="$arm/.fetched"
if [ "$(cat "$fetched" 2>/dev/null)" != "$debian $versions" ]; then
  mkdir -p "$arm"
  packages || skip "Debian's packages could not be fetched"
  wheels || skip "wheels for aarch64 could not be fetched"
  echo "$debian $versions" >"$fetched"
fi

# A processor of ARMv8.2 with dot products, and `max`, which has products of matrices (i8mm), too.
on_arm() {
  "$arm/qemu/usr/bin/qemu-aarch64-static" -cpu "$1" -L "$arm/root" -E PYTHONPATH="$arm/site:src" -E LLAMADO_CACHE="$arm/cache" \
    "$arm/root/usr/bin/python3.11" "${@:2}" </dev/null
}
tests=(-q -p no:cacheprovider)
if [ $# -gt 0 ]; then first=("$@") second=(); else
  tests+=(-m "not slow")
  first=(tests/devices/test_rows.py tests/devices/test_operations.py tests/devices/test_attention.py)
  second=(tests/models/test_lowerings.py tests/devices/test_float_products.py tests/devices/test_team.py
    tests/devices/test_product_bits.py)
fi
bits="$(mktemp -u)"
trap 'rm -f "$bits"' EXIT
echo "== here"
PYTHONPATH=src "$python" -m pytest "${tests[@]}" --bits "$bits" "${first[@]}" "${second[@]}" </dev/null
echo "== on ARM"
on_arm cortex-a76 -m pytest "${tests[@]}" --bits "$bits" "${first[@]}" &
code=0
[ ${#second[@]} = 0 ] || on_arm max -m pytest "${tests[@]}" --bits "$bits" "${second[@]}" || code=$?
wait $! || code=$?
exit $code
