#!/usr/bin/env bash
# What is trained for: --no-decay (parameters that it names are updated as without weight decay) and --label-smoothing (by finite differences).
# Runs beside others: it measures no time.
set -u
/usr/bin/python3 -c 'import h5py, numpy' 2>/dev/null || { echo "needs python3-h5py"; exit 77; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
/usr/bin/python3 "$(dirname "$0")/objective.py" "$HAPT" "$scratch"
