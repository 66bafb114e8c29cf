#!/usr/bin/env bash
# SimGrid replays the instruction lists in the time of hapt simulate: some random pipelines, HAPT_LONG=1: all of bench/judge.
# Runs beside others: it measures no time.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1
if [ "${HAPT_LONG:-0}" != 0 ]; then parts="simgrid gpt39b looped" smoke=; else parts="simgrid" smoke=1; fi
HAPT_BENCH_SMOKE=$smoke timeout 600 /usr/bin/python3 bench/judge $parts >"$scratch/out" 2>&1
code=$?
[ $code -eq 77 ] && { tail -n 1 "$scratch/out"; exit 77; }
check "bench/judge $parts ends with code $code: $(tail -n 20 "$scratch/out")" test $code -eq 0
check "its summary" grep -qE 'links in turn: [1-9][0-9]* cases, off by ' "$scratch/out"
finish
