#!/usr/bin/env bash
# --no-decay: parameters that it names are updated as without weight decay, the others as with it.
# Runs beside others: it measures no time.
set -u
/usr/bin/python3 -c 'import h5py, numpy' 2>/dev/null || { echo "needs python3-h5py"; exit 77; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
/usr/bin/python3 "$(dirname "$0")/decay.py" "$HAPT" "$scratch"
