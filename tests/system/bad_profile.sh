#!/usr/bin/env bash
# `hapt plan --profile` and `hapt simulate --profile` on files that h5py damaged: one clear error, the right exit code.
# Runs beside others: it measures no time.
/usr/bin/python3 -c 'import h5py' 2>/dev/null || { echo "needs python3-h5py"; exit 77; }
exec /usr/bin/python3 "$(dirname "$0")/bad_profile.py"
