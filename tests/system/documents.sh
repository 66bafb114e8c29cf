#!/usr/bin/env bash
# Rows of several documents (--document-end): losses are those of each document alone, in NumPy and in rows of their own, under every plan.
# Runs beside others: it measures no time.
set -u
/usr/bin/python3 -c 'import h5py, numpy' 2>/dev/null || { echo "needs python3-h5py"; exit 77; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
/usr/bin/python3 "$(dirname "$0")/documents.py" "$HAPT" "$scratch"
