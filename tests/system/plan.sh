#!/usr/bin/env bash
# `hapt plan` and `hapt simulate` on files that h5py wrote: the same numbers in other types and layouts.
# Runs beside others: it measures no time.
/usr/bin/python3 -c 'import h5py' 2>/dev/null || { echo "needs python3-h5py"; exit 77; }
exec /usr/bin/python3 "$(dirname "$0")/plan.py"
