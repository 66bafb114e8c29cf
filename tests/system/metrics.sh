#!/usr/bin/env bash
# Metrics while a run trains: h5py opens run.h5 100 times, run.h5, metrics.csv and the newest checkpoint agree after kill -9 at random moments,
# and a resumed run continues them without gaps. NeXus attributes, event files, step lines, hapt report --json. A failing write of metrics is a
# warning. HAPT_LONG=1: 50 kills. HAPT_SEED repeats one.
# Runs beside others: it measures no time.
. tests/system/lib.sh.inc
kills=3
[ -z "${HAPT_LONG:-}" ] || kills=50
passes 1 data README.md --output "$scratch/t.h5" || finish
passes 1 model gpt --layers 1 --hidden 32 --heads 2 --sequence 16 --vocab 256 --microbatch 2 --output "$scratch/m.h5" || finish
plans_of_one_and_two
# Sleeping devices: longer runs without more work, so that kills and reads meet several versions of run.h5.
sed -i 's/"device": "cpu"/"device": "cpu", "slowdown": 4/' "$scratch"/c[12].json
for part in reads files faults kills; do
    checks=$((checks + 1))
    /usr/bin/python3 tests/system/metrics.py "$HAPT" "$scratch" "$HAPT_BUILD/tests/faults/faults.so" $part $kills >"$scratch/said" 2>&1 ||
        fail "$part: $(tail -n 40 "$scratch/said")"
    figures="${figures:+$figures; }$(tail -n 1 "$scratch/said")"
done
finish
