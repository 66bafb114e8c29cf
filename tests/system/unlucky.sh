#!/usr/bin/env bash
# Wrong inputs, bad luck and interruptions as users meet them. The table is tests/system/unlucky.txt. Checks the exit code, one error line
# with a hint, the message, and that no earlier file is lost.
# HAPT_LONG=1: the table three times, with different loads of the machine. HAPT_ROWS: only rows whose names match this pattern;
# HAPT_MARKS=no: without the marked ones.
# Runs beside others
. tests/system/lib.sh.inc
checks=$((checks + 1))
/usr/bin/python3 tests/system/unlucky.py "$HAPT" "$scratch" >"$scratch/said" 2>&1 || fail "$(tail -n 150 "$scratch/said")"
figures=$(tail -n 1 "$scratch/said")
finish
