#!/usr/bin/env bash
# The simulator against steps that others measured, within the tolerances of bench/judge; those of one microbatch stand apart.
# Runs beside others: it measures no time.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1
judge() { # CODE OPTIONS...
    checks=$((checks + 1))
    timeout 240 /usr/bin/python3 bench/judge "${@:2}" >"$scratch/out" 2>&1
    local code=$?
    [ $code -eq 77 ] && { tail -n 1 "$scratch/out"; exit 77; }
    [ $code -eq "$1" ] || fail "bench/judge ${*:2} ends with code $code, not $1: $(tail -n 20 "$scratch/out")"
}
judge 0 sailor
check "12 cases of several microbatches" grep -qE 'B > 1: 12 cases, off by [0-9.]+ % in the median \(at most 3 %\), [0-9.]+ % at worst' "$scratch/out"
check "one case of one microbatch" test "$(grep -cE '^  \S+ +1 +[0-9.]+ s +[0-9.]+ s +[0-9.]+$' "$scratch/out")" = 1
judge 0 mist
check "its step and its memory" test "$(grep -cE '^  (step|memory): 1 cases, off by [0-9.]+ % ' "$scratch/out")" = 2
# A simulator that is wrong is found: here it overlaps transfers, which those frameworks do not.
cat >"$scratch/overlaps" <<P
#!/bin/sh
for word do shift; [ "\$word" = yes ] && word=no; set -- "\$@" "\$word"; done
exec "$HAPT" "\$@"
P
chmod +x "$scratch/overlaps"
HAPT=$scratch/overlaps judge 1 sailor
check "which tolerance" grep -q 'EXCEEDED' "$scratch/out"
judge_unknown=$(/usr/bin/python3 bench/judge nobody 2>&1)
check "an unknown part: $judge_unknown" grep -q '^hint: the parts are' <<<"$judge_unknown"
finish
