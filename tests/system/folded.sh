#!/usr/bin/env bash
# Plans whose submeshes run several stages: the bits of the plan with a submesh per stage, resuming with either (rehearsals.sh: modelled
# devices).
# Runs beside others: it measures no time.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1

losses() { grep -o '"loss": \[[^]]*\]' "$scratch/out"; }
head -c 60000 src/model/*.c >"$scratch/text.txt"
passes 1 data "$scratch/text.txt" --output "$scratch/tokens.h5"
passes 1 model gpt --layers 4 --hidden 64 --heads 2 --sequence 32 --vocab 256 --microbatch 2 --tied-embeddings yes --data "$scratch/tokens.h5" \
    --output "$scratch/m.h5"
passes 1 plan --input "$scratch/m.h5" --cluster inputs/two-hosts.json --predict yes --microbatches 8 --layers-per-model 6 \
    --stages "0-1@slow:1x1,1-3@fast:1x1,3-4@slow:1x1,4-6@fast:1x1" --output "$scratch/own.h5" || finish
cp "$scratch/own.h5" "$scratch/looped.h5" && fold "$scratch/looped.h5" 0 1 0 1
passes 1 check "$scratch/own.h5" "$scratch/looped.h5"
run() { # PLAN OUTPUT OPTIONS...
    passes 4 train --input "$scratch/m.h5" --cluster inputs/two-hosts.json --plan "$scratch/$1.h5" --layers-per-model 6 --threads 1 --json \
        --output "$scratch/$2" "${@:3}"
}

# Tied gradients of the first and the last stage cross from one submesh to the other, in the order of the stages.
run own own --steps 6 && want=$(losses)
for schedule in h1f1b 1f1b gpipe; do
    run looped looped-$schedule --steps 6 --schedule $schedule --trace 1 && got=$(losses)
    checks=$((checks + 1))
    [ -n "$want" ] && [ "$got" = "$want" ] || fail "$schedule: losses $got instead of $want"
done
run own half --steps 6 --stop-after 3 --checkpoint-every 1
run looped half --steps 6 --resume && got=$(losses)
checks=$((checks + 2))
[ "$got" = "$want" ] || fail "resumed with shared submeshes: losses $got instead of $want"
# one shard per submesh; the timeline has the passes of both stages of a rank
[ "$(ls "$scratch"/looped-h1f1b/checkpoints/step-00000006/shard-*.h5 | wc -l)" = 2 ] || fail "shards: $(ls "$scratch"/looped-h1f1b/checkpoints/*)"
checks=$((checks + 1))
/usr/bin/python3 - "$scratch/looped-h1f1b/run.h5" <<'P' >"$scratch/said" 2>&1 || fail "timeline: $(cat "$scratch/said")"
import sys, h5py
with h5py.File(sys.argv[1]) as run:
    passes = [(r, s, m) for r, s, m, k in zip(run["/trace/rank"][...], run["/trace/stage"][...], run["/trace/microbatch"][...], run["/trace/kind"][...])
              if k in (b"forward", "forward")]
    assert sorted((s, m) for r, s, m in passes) == [(s, m) for s in range(4) for m in range(8)], passes
    assert len({r for r, s, m in passes}) == 2 and all((s % 2 == 0) == (r == passes[0][0]) or passes[0][1] % 2 for r, s, m in passes), passes
P

# The neighbours of a fold share a submesh: nothing is sent between them.
passes 1 plan --input "$scratch/m.h5" --cluster inputs/two-hosts.json --predict yes --microbatches 8 --layers-per-model 6 \
    --stages "0-2@slow:1x1,2-3@fast:1x1,3-4@fast:1x1,4-6@slow:1x1" --output "$scratch/v.h5" || finish
fold "$scratch/v.h5" 0 1 1 0
run v v --steps 6 && got=$(losses)
checks=$((checks + 1))
python3 - "$want" "$got" <<'P' >"$scratch/said" 2>&1 || fail "$(cat "$scratch/said")"
import json, sys
want, got = (json.loads("{" + text + "}")["loss"] for text in sys.argv[1:])
assert max(abs(a - b) / b for a, b in zip(got, want)) < 1e-5, (want, got)
P

finish
