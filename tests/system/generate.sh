#!/usr/bin/env bash
# hapt generate: tokens that follow prompts, against NumPy in fp64; draws against their probabilities; the same under every plan.
# Runs beside others: it measures no time.
set -u
/usr/bin/python3 -c 'import h5py, numpy' 2>/dev/null || { echo "needs python3-h5py"; exit 77; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
/usr/bin/python3 "$(dirname "$0")/generate.py" "$HAPT" "$scratch"
