#!/usr/bin/env bash
# Frozen weights in 8 or 16 bits: the bits of weights that NumPy rounded, under every plan; memory; resuming; export.
# Runs beside others: it measures no time.
set -u
/usr/bin/python3 -c 'import h5py, numpy' 2>/dev/null || { echo "needs python3-h5py"; exit 77; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
/usr/bin/python3 "$(dirname "$0")/packed.py" "$HAPT" "$scratch"
