#!/usr/bin/env bash
# Models with a label for each pixel: losses, top-1, a step of gradient descent against NumPy; pixels without a label; damaged data.
# Runs beside others: it measures no time.
set -u
/usr/bin/python3 -c 'import h5py, numpy' 2>/dev/null || { echo "needs python3-h5py"; exit 77; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
/usr/bin/python3 "$(dirname "$0")/pixels.py" "$HAPT" "$scratch"
