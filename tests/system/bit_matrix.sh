#!/usr/bin/env bash
# One set of losses and weights for each model under all schedules, and whatever leaves the devices, on 1 to 4 ranks with up to 8 stages
# (bit_matrix.py).
# Runs beside others: it measures no time.
. tests/system/lib.sh.inc
/usr/bin/python3 -c 'import h5py' 2>/dev/null || { echo "needs python3-h5py"; exit 77; }
checks=$((checks + 1))
/usr/bin/python3 tests/system/bit_matrix.py "$HAPT" "$scratch" >"$scratch/said" 2>&1 || fail "$(cat "$scratch/said")"
figures=$(tail -n 1 "$scratch/said")
finish
