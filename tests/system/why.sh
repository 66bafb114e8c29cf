#!/usr/bin/env bash
# The questions that `hapt plan` answers about a plan: --explain, --what-if, --diff.
# Runs beside others: it measures no time.
/usr/bin/python3 -c 'import h5py' 2>/dev/null || { echo "needs python3-h5py"; exit 77; }
exec /usr/bin/python3 "$(dirname "$0")/why.py"
