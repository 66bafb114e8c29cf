#!/usr/bin/env bash
# HAPT's case study: the paper's plans at the paper's prices, the planner's optima beside them.
# Runs beside others: it measures no time.
/usr/bin/python3 -c 'import h5py' 2>/dev/null || { echo "needs python3-h5py"; exit 77; }
exec /usr/bin/python3 "$(dirname "$0")/case_study.py"
