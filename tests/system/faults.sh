#!/usr/bin/env bash
# Disks that fail under a checkpoint: the n-th call of a kind fails, or a rank dies before it, a file system fills up, the machine stops
# after any call. Earlier checkpoints stay intact; a failure is one clear error (code 6), and nothing hangs. Then memory, opening, reading,
# mapping or a thread fails while a run is resumed: no checkpoint is lost. HAPT_LONG=1: a large random part of the calls; HAPT_EVERY=1: all of
# them, of memory one of each call stack. HAPT_PARTS: only some of the parts. HAPT_RANKS=1 or 2: only so many ranks.
# Runs beside others: it measures no time.
. tests/system/lib.sh.inc
library=$HAPT_BUILD/tests/faults/faults.so
[ -e "$library" ] || { echo "no $library"; exit 77; }
passes 1 data tests/system/lib.sh.inc --output "$scratch/t.h5" || finish
passes 1 model gpt --layers 1 --hidden 16 --heads 2 --sequence 8 --vocab 256 --microbatch 2 --data "$scratch/t.h5" --output "$scratch/m.h5" || finish
for ranks in 1 2; do
    cat >"$scratch/c$ranks.json" <<JSON
{ "format": "hapt-cluster", "version": 1, "subclusters": [
    {"name": "a", "nodes": 1, "devices_per_node": $ranks, "device": "cpu", "memory": "300 MB"} ] }
JSON
    passes 1 profile --input "$scratch/m.h5" --cluster "$scratch/c$ranks.json" --predict --layers-per-model 4 --output "$scratch/p.h5" || finish
    layers=$(h5dump -H -d /boundary_bytes "$scratch/p.h5" | sed -n 's/.*SIMPLE *{ *( *\([0-9]*\).*/\1/p')
    [ $ranks -eq 1 ] && stages="0-$layers@a:1x1" || stages="0-2@a:1x1,2-$layers@a:1x1"
    passes 1 plan --profile "$scratch/p.h5" --microbatches 2 --stages "$stages" --output "$scratch/plan$ranks.h5" || finish
done
for part in ${HAPT_PARTS:-calls kill crash ${HAPT_LONG:+disk} resume}; do
    checks=$((checks + 1))
    /usr/bin/python3 tests/system/faults.py "$HAPT" "$scratch" "$library" $part >"$scratch/said" || fail "$part: $(cat "$scratch/said")"
    figures="${figures:+$figures; }$(tail -n 1 "$scratch/said")"
done
finish
