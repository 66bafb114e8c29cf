#!/usr/bin/env bash
# Every family with a PyTorch reference in tests/data: the same losses and trained weights, for all plans.
# Runs beside others: it measures no time.
/usr/bin/python3 -c 'import h5py' 2>/dev/null || { echo "needs python3-h5py"; exit 77; }
exec /usr/bin/python3 "$(dirname "$0")/families.py"
