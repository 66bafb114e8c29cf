#!/usr/bin/env bash
# Every family whose reference run by PyTorch stands in tests/data: the same losses and trained weights, whatever the plan.
# Runs beside others: it measures no time.
/usr/bin/python3 -c 'import h5py' 2>/dev/null || { echo "needs python3-h5py"; exit 77; }
exec /usr/bin/python3 "$(dirname "$0")/families.py"
