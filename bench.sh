#!/usr/bin/env bash
# Plain decoding over 2, 3 and 4 workers behind links of 0 to 30 ms: `llamado bench --latency --nodes`, as a table.
#
#   ./bench.sh              the default model (SmolLM2 135M)
#   ./bench.sh glm          GLM 4.7 Flash; any model that ./demo.sh takes
#   NODES=3 LATENCIES=0,20 ./bench.sh PATH.gguf    machines (the server counted) and delays in ms, comma-separated
#
# Flags of llamado bench may follow the model: --compare ring,drafts,streams,predicted adds columns.
set -euo pipefail
case "${1:-}" in -h | --help) sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;; esac
folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
"$folder/demo.sh" install
model=${1:-smollm2}
[ $# -eq 0 ] || shift
exec "$folder/.venv/bin/python" -P -m llamado bench -m "$model" \
  --nodes "${NODES:-3,4,5}" --latency "${LATENCIES:-0,5,10,20,30}" "$@"
