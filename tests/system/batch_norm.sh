#!/usr/bin/env bash
# Running statistics of batch norm: they and the loss of held-out images are NumPy's, under every plan; a resumed run has the same bits.
# Runs beside others: it measures no time.
set -u
/usr/bin/python3 -c 'import h5py, numpy' 2>/dev/null || { echo "needs python3-h5py"; exit 77; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
/usr/bin/python3 "$(dirname "$0")/batch_norm.py" "$HAPT" "$scratch"
