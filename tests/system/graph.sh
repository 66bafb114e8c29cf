#!/usr/bin/env bash
# Graphs that Python writes with tools/hapt.py, and hapt ops.
# Runs beside others: it measures no time.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1
/usr/bin/python3 -c 'import h5py' 2>/dev/null || { echo "needs python3-h5py"; exit 77; }
/usr/bin/python3 "$(dirname "$0")/graph.py" "$HAPT" "$scratch"
