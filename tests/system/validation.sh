#!/usr/bin/env bash
# --validation-data and hapt evaluate: the loss on held-out rows against NumPy in fp64; training keeps its bits.
# Runs beside others: it measures no time.
set -u
/usr/bin/python3 -c 'import h5py, numpy' 2>/dev/null || { echo "needs python3-h5py"; exit 77; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
/usr/bin/python3 "$(dirname "$0")/validation.py" "$HAPT" "$scratch"
