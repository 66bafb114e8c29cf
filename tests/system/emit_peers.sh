#!/usr/bin/env bash
# Plans for other trainers (hapt plan --emit torchtitan): PyTorch's pipelining runtime loads the schedule and trains the modules of each stage
# on four processes, with hapt's losses. Needs a Python with torch 2 and transformers 5 in HAPT_TRANSFORMERS; else it is skipped.
# Runs beside others: it measures no time.
set -u
python=${HAPT_TRANSFORMERS:-}
[ -n "$python" ] || { echo "skipped: HAPT_TRANSFORMERS names no Python with transformers"; exit 77; }
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
HF_HUB_OFFLINE=1 exec "$python" tests/system/emit_peers.py "$HAPT" "$dir"
