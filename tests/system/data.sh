#!/usr/bin/env bash
# hapt data from several files and from Megatron's; data files of every storage; targets beside a stream; epochs.
# Runs beside others: it measures no time.
set -u
/usr/bin/python3 -c 'import h5py, numpy' 2>/dev/null || { echo "needs python3-h5py"; exit 77; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
/usr/bin/python3 "$(dirname "$0")/data.py" "$HAPT" "$scratch"
