#!/usr/bin/env bash
# Models with named inputs (/batches/NAME): losses and steps of gradient descent against NumPy; missing targets; damaged data.
# Runs beside others: it measures no time.
set -u
/usr/bin/python3 -c 'import h5py, numpy' 2>/dev/null || { echo "needs python3-h5py"; exit 77; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
/usr/bin/python3 "$(dirname "$0")/fields.py" "$HAPT" "$scratch"
