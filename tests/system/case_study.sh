#!/usr/bin/env bash
# HAPT's case study: the paper's plans with the paper's prices, and the planner's optima.
# Runs beside others: it measures no time.
/usr/bin/python3 -c 'import h5py' 2>/dev/null || { echo "needs python3-h5py"; exit 77; }
exec /usr/bin/python3 "$(dirname "$0")/case_study.py"
