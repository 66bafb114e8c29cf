#!/usr/bin/env bash
# Models that tools/hapt_export.py made of PyTorch's: they train as there. With PyTorch 2 (HAPT_TRANSFORMERS: a python with torch, torchvision
# and transformers) they are exported again, and mistakes are refused. HAPT_LONG=1: with it also all models of tests/coverage.
# Runs beside others: it measures no time.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1
/usr/bin/python3 -c 'import h5py' 2>/dev/null || { echo "needs python3-h5py"; exit 77; }
/usr/bin/python3 tests/system/exported.py "$HAPT" "$scratch" >"$scratch/said" 2>&1
code=$?
cat "$scratch/said"
if [ $code -eq 0 ] && [ -n "${HAPT_LONG:-}" ] && "${HAPT_TRANSFORMERS:-false}" -c 'import torch, transformers' 2>/dev/null; then
    "$HAPT_TRANSFORMERS" tests/coverage/coverage.py "$HAPT" "$scratch/coverage" || exit 1
fi
tail -n 1 "$scratch/said"
exit $code
