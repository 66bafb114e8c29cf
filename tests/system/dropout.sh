#!/usr/bin/env bash
# Dropout: the first loss is that of NumPy with the same masks; every plan, recomputation and a resumed run have the same losses; held-out data are
# read without dropout.
# Runs beside others: it measures no time.
set -u
/usr/bin/python3 -c 'import h5py, numpy' 2>/dev/null || { echo "needs python3-h5py"; exit 77; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
/usr/bin/python3 "$(dirname "$0")/dropout.py" "$HAPT" "$scratch"
