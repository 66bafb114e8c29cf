#!/usr/bin/env bash
# Two jobs in one folder, with the same --output and with default folders. The first is never disturbed. The second ends with exit code 2
# and the first one's name, or takes the next default folder. Also locks that are stale, unreadable, links, of another host, or stolen.
# HAPT_LONG=1: 20 rounds and the waits of half a minute. HAPT_SEED repeats one.
# Runs beside others
. tests/system/lib.sh.inc
rounds=2
[ -z "${HAPT_LONG:-}" ] || rounds=20
passes 1 data README.md --output "$scratch/t.h5" || finish
passes 1 model gpt --layers 1 --hidden 32 --heads 2 --sequence 16 --vocab 256 --microbatch 2 --output "$scratch/m.h5" || finish
plans_of_one_and_two
checks=$((checks + 1))
/usr/bin/python3 tests/system/owners.py "$HAPT" "$scratch" $rounds >"$scratch/said" 2>&1 || fail "$(cat "$scratch/said")"
figures=$(tail -n 1 "$scratch/said")
finish
