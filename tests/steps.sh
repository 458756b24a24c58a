# Steps of .ci/run and tests/full.sh, which source this file. Every step runs, and the last lines name the tests and the
# steps that failed, with the reason of each, because CI may keep only the end of a long output.
#
# What takes long to make is kept in the user's cache folder: the compiled llama.cpp (LLAMADO_PEER_HOME, default
# ~/.cache/llamado-peer), models and kernels (LLAMADO_CACHE, default ~/.cache/llamado).

unset PYTHONDONTWRITEBYTECODE # see test.sh
export CI=1                    # pytest does not shorten the reasons of failures
pytest=(.venv/bin/python -m pytest -q)
flaky=() failed=() reasons=()
output=$(mktemp)
trap 'rm -f "$output"' EXIT

# Only a command that hangs takes so long: the slowest takes half an hour alone, and a busy machine four times as long.
limit_s=14400

# step NAME COMMAND...
step() {
  local code=0
  _timed "$@" || code=$?
  [ $code = 0 ] || failed+=("$1 ($(_reason $code))")
}

# tests NAME COMMAND...: a command that runs pytest with this folder's cache. Tests that fail run once more, alone:
# most start processes, and the machine may be busy with others. Those that pass then are listed as flaky at the end.
tests() {
  local code=0 first again
  rm -f .pytest_cache/v/cache/lastfailed
  _timed "$@" || code=$?
  [ $code != 0 ] || return 0
  mapfile -t first < <(_last_failed)
  mapfile -t -O ${#reasons[@]} reasons < <(grep -aE '^(FAILED|ERROR) ' "$output" | head -n 10 | cut -c 1-300)
  if [ $code != 1 ] || [ ${#first[@]} = 0 ]; then
    failed+=("$1 ($(_reason $code))")
    return 0
  fi
  code=0
  _timed "$1: failed tests once more" "${pytest[@]}" --last-failed --last-failed-no-failures none || code=$?
  mapfile -t again < <(_last_failed)
  mapfile -t -O ${#flaky[@]} flaky < <(comm -23 <(printf '%s\n' "${first[@]}") <(printf '%s\n' "${again[@]}"))
  [ $code = 0 ] || failed+=("$1 ($(_reason $code)) ${again[*]:0:5}")
}

# Print what was flaky and what failed; the exit status says whether anything failed.
finish() {
  printf '\n== %d:%02d flaky: %d\n' $((SECONDS / 60)) $((SECONDS % 60)) ${#flaky[@]}
  [ ${#reasons[@]} = 0 ] || printf '%s\n' "${reasons[@]}"
  [ ${#flaky[@]} = 0 ] || printf 'flaky: %s\n' "${flaky[@]}"
  if [ ${#failed[@]} != 0 ]; then
    printf 'FAILED: %s\n' "${failed[@]}"
    exit 1
  fi
  echo "passed"
}

_timed() {
  printf '\n== %d:%02d %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$1"
  local code=0 sink
  exec {sink}> >(exec tee "$output")
  timeout --kill-after=20 $limit_s "${@:2}" </dev/null >&"$sink" 2>&1 {sink}>&- || code=$?
  exec {sink}>&-
  # Wait for the end of the output. A process that the command left running keeps it open.
  timeout 2 tail -s 0.05 --pid=$! -f /dev/null || true
  return $code
}

_reason() {
  case $1 in
  124 | 137) echo "took longer than $limit_s s" ;;
  *) echo "exit status $1: $(sed '/^[[:space:]]*$/d' "$output" | tail -n 1 | cut -c 1-300)" ;;
  esac
}

_last_failed() {
  python3 -c 'import json; print(*sorted(json.load(open(".pytest_cache/v/cache/lastfailed"))), sep="\n")' 2>/dev/null |
    sed '/^$/d' || true
}
