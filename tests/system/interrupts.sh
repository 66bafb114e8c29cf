#!/usr/bin/env bash
# Signals at random moments from start to exit: KILL, STOP (continued after a random time, or never), TERM, INT, HUP, USR1, SEGV. They hit a
# rank, a sandbox process or the launcher of each command, on 1 to 3 ranks. Afterwards nothing hangs longer than --timeout, no process is
# left, nothing earlier is lost, and no lock refuses the next start. After resuming, the weights are those of an undisturbed run.
# HAPT_LONG=1: 100 signals. HAPT_SIGNALS: how many. HAPT_SEED repeats one.
# Runs beside others
. tests/system/lib.sh.inc
signals=5
[ -z "${HAPT_LONG:-}" ] || signals=100
signals=${HAPT_SIGNALS:-$signals}
passes 1 data README.md --output "$scratch/t.h5" || finish
passes 1 model gpt --layers 2 --hidden 64 --heads 4 --sequence 32 --vocab 256 --microbatch 2 --output "$scratch/m.h5" || finish
three_devices "300 MB"
mv "$scratch/c.json" "$scratch/c3.json"
for ranks in 3 2 1; do
    [ $ranks -eq 3 ] || cat >"$scratch/c$ranks.json" <<JSON
{ "format": "hapt-cluster", "version": 1, "subclusters": [
    {"name": "a", "nodes": 1, "devices_per_node": $ranks, "device": "cpu", "memory": "300 MB"} ] }
JSON
    passes 1 profile --input "$scratch/m.h5" --cluster "$scratch/c$ranks.json" --predict --layers-per-model 6 --output "$scratch/p.h5" || finish
    count_layers
    case $ranks in
        1) stages="0-$layers@a:1x1" ;;
        2) stages="0-2@a:1x1,2-$layers@a:1x1" ;;
        3) stages="0-2@a:1x2,2-$layers@b:1x1" ;;
    esac
    echo "$stages" >"$scratch/stages$ranks"
    passes 1 plan --profile "$scratch/p.h5" --microbatches 2 --stages "$stages" --output "$scratch/plan$ranks.h5" || finish
    cp "$scratch/p.h5" "$scratch/p$ranks.h5"
done
checks=$((checks + 1))
/usr/bin/python3 tests/system/interrupts.py "$HAPT" "$scratch" "$signals" >"$scratch/said" 2>&1 || fail "$(tail -n 80 "$scratch/said")"
[ -z "${HAPT_LONG:-}" ] || cat "$scratch/said"
figures=$(tail -n 1 "$scratch/said")
finish
