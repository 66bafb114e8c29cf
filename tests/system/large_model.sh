#!/usr/bin/env bash
# A published model that is large for its machine: the peak memory of each rank. HAPT_LONG=1: 3.1 B parameters.
# Runs beside others: it measures no time.
set -u
/usr/bin/python3 -c 'import h5py, numpy' 2>/dev/null || { echo "needs python3-h5py"; exit 77; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
/usr/bin/python3 "$(dirname "$0")/large_model.py" "$HAPT" "$scratch"
