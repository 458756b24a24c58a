#!/usr/bin/env bash
# The package as users get it: built, checked as an index does, installed in empty environments (the wheel by pip and
# by pipx, the sdist by uv), where it answers and where what it says of missing packages installs them. With the argument
# `pip`, the wheel by pip alone.
set -euo pipefail
installers="${1:-pip uv pipx}"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="$PWD/.venv/bin/python"
folder=$(mktemp -d)
server=""
trap '[ -z "$server" ] || kill "$server" 2>/dev/null; rm -rf "$folder"' EXIT
say() { printf '%3d s  %s\n' "$SECONDS" "$*"; }
fail() { echo "package.sh: $*" >&2; exit 1; }

"$python" -m venv "$folder/tools"
"$folder/tools/bin/pip" install -qq --disable-pip-version-check 'build>=1.2,<2' 'twine>=6,<8' </dev/null
[ "$installers" = pip ] || "$folder/tools/bin/pip" install -qq --disable-pip-version-check 'uv>=0.5,<1' 'pipx>=1.7,<2' </dev/null
PATH="$folder/tools/bin:$PATH"
say "tools are installed"

# The wheel of the first is built from the sdist, as an index's users build it; the second is built from the clone.
python -m build --outdir "$folder/dist" . >"$folder/log" 2>&1 || { cat "$folder/log"; exit 1; }
python -m build --wheel --outdir "$folder/clone" . >"$folder/log" 2>&1 || { cat "$folder/log"; exit 1; }
twine --no-color check --strict "$folder"/dist/*
wheel=$(echo "$folder"/dist/*.whl) sdist=$(echo "$folder"/dist/*.tar.gz)
python - "$wheel" "$folder"/clone/*.whl "$sdist" <<'END'
import subprocess, sys, tarfile, zipfile

def contents(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}

one, other = map(contents, sys.argv[1:3])
different = {name for name in one.keys() | other.keys() if one.get(name) != other.get(name) and not name.endswith("/RECORD")}
assert not different, f"the sdist makes another wheel than the clone: {sorted(different)[:10]}"
with tarfile.open(sys.argv[3]) as archive:
    packed = {member.name.partition("/")[2] for member in archive if member.isfile()}
known = set(subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.split())
missing = known - packed
assert not missing, f"the sdist lacks {sorted(missing)[:10]}"
unknown = packed - known - {"PKG-INFO", "src/llamado/commit.txt"}
new = set(subprocess.run(["git", "ls-files", "--others", "--exclude-standard"], capture_output=True, text=True).stdout.split())
assert unknown <= new, f"the sdist has what is no source: {sorted(unknown - new)[:10]}"
END
say "built and checked: $(du -k "$wheel" | cut -f1) kB, sdist $(du -k "$sdist" | cut -f1) kB"

model="$folder/tiny.gguf"
PYTHONPATH=tests "$python" -c 'import sys; from pathlib import Path; from tiny_models import make_llama; make_llama(Path(sys.argv[1]))' "$model"

# An empty folder and home, and nothing of this clone: what is installed has to do.
mkdir "$folder/empty" "$folder/home"
# UV_SYSTEM_CERTS: a machine may know more authorities than uv brings along; pip asks the machine by itself.
as_user() { (cd "$folder/empty" && env -i HOME="$folder/home" PATH="$folder/tools/bin:/usr/bin:/bin" LANG=C.UTF-8 UV_SYSTEM_CERTS=1 \
  PIPX_HOME="$folder/pipx" PIPX_BIN_DIR="$folder/pipx/bin" "${@/#llamado/$bin/llamado}"); }
# An index of one's own, if this machine has one.
for name in PIP_INDEX_URL PIP_FIND_LINKS PIP_CONFIG_FILE UV_INDEX_URL UV_DEFAULT_INDEX UV_FIND_LINKS SSL_CERT_FILE http_proxy https_proxy; do
  [ -z "${!name:-}" ] || eval "$(declare -f as_user | sed "s|env -i|env -i $name='${!name}'|")"
done

# check NAME: what is installed in $bin answers, and its hint for an extra works.
check() {
  as_user llamado --version >/dev/null
  local port
  port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  as_user llamado serve -m "$model" --port "$port" -c 256 >"$folder/log" 2>&1 &
  server=$!
  local url="http://127.0.0.1:$port"
  as_user llamado wait "$url" --timeout 60 >/dev/null || { cat "$folder/log"; fail "$1: the server is not ready"; }
  curl -fsS "$url/" | grep -q '<title>' || fail "$1: no page at /"
  curl -fsS "$url/v1/completions" -d '{"prompt": "Hello", "max_tokens": 4}' | grep -q '"finish_reason"' || fail "$1: no answer"
  kill "$(pgrep -P "$server" -f 'llamado serve' || echo "$server")"
  wait "$server" || fail "$1: the server ended with $?"
  server=""
  local hint
  hint=$(as_user llamado cluster init 2>&1 && fail "$1: cryptography is there already") || true
  hint=$(sed -n 's/.*cryptography is missing: //p' <<<"$hint")
  [ -n "$hint" ] || fail "$1: no hint"
  say "$1 answers; its hint: ${hint//$folder/…}"
  as_user bash -c "$hint" >"$folder/log" 2>&1 </dev/null || { cat "$folder/log"; fail "$1: the hint does not work: $hint"; }
  as_user llamado cluster init >/dev/null || fail "$1: the hint installed nothing"
  rm -rf "$folder/empty"/*
}

"$python" -m venv "$folder/pip"
bin="$folder/pip/bin"
as_user "$bin/pip" install -qq --disable-pip-version-check "$wheel" </dev/null
check "the wheel, by pip"
[ "$installers" != pip ] || exit 0
bin="$folder/uv/bin"
as_user uv venv --quiet --python "$(readlink -f "$python")" "$folder/uv"
as_user uv pip install --quiet --python "$bin/python" "$sdist"
check "the sdist, by uv"
bin="$folder/pipx/bin"
as_user pipx install --quiet --python "$(readlink -f "$python")" "$wheel" >/dev/null </dev/null
check "the wheel, by pipx"
say "done"
