#!/usr/bin/env bash
# The watch of a run, as it stops: a request, ranks that stand still or die, lost messages, values that are not finite.
# Runs beside others: its limits of time are generous.
. tests/system/lib.sh.inc
. tests/system/watch.sh.inc

# one rank gets a signal: all stop at the end of a step
train asked --steps 100000 --checkpoint-every 5
until_true 60 has_checkpoint asked
kill -TERM "${rank[1]}"
ends 100
check "a rank was asked to leave: code 9, not $code" [ "$code" -eq 9 ]
check "a signal is named" grep -q 'stopped by a signal after step' "$scratch/asked.err"
check "nothing is wrong" [ "$(grep -c 'error:' "$scratch/asked.err")" -eq 0 ]
steps=$(steps_of "$scratch/asked/run.h5")
check "the newest checkpoint is of the last step" [ -d "$scratch/asked/checkpoints/step-$(printf %08d "$steps")" ]

# a rank that hangs is named by its neighbour, with its last activity; no process is left
start still-profile 3 --input "$scratch/large.h5" --cluster "$scratch/c.json" --data "$scratch/t.h5" --threads 1 \
    --profile-seconds 60 --timeout 5 --output "$scratch/still-profile"
remember still-profile
train still-train --steps 100000 --checkpoint-every 5 --timeout 5
remember still-train
# an agreement before training that never completes on rank 1, but on all others
LD_PRELOAD=$HAPT_BUILD/tests/faults/lost.so LOST_RANK=1 LOST_AT=12 start lost 3 plan --input "$scratch/large.h5" --cluster "$scratch/c.json" \
    --timeout 5 --output "$scratch/lost.h5"
remember lost
# an all-reduce that fails on rank 1 alone, after heartbeats have begun
LD_PRELOAD=$HAPT_BUILD/tests/faults/lost.so LOST_ALL_REDUCE=1 LOST_RANK=1 LOST_AT=8 start broken 3 plan --input "$scratch/large.h5" \
    --cluster "$scratch/c.json" --timeout 5 --output "$scratch/broken.h5"
remember broken
until_true 100 has_checkpoint still-train
until_true 60 grep -q '^Cluster' "$scratch/still-profile.out"
sleep 1.5 # one or two heartbeats
for phase in profile train; do
    recall still-$phase
    kill -STOP "${rank[1]}"
done
recall lost
ends 60
check "a message of MPI is lost: code 7, not $code" [ "$code" -eq 7 ]
check "one line tells of it" [ "$(grep -c error: "$scratch/lost.err")" -eq 1 ]
check "the waiting rank is named: $(cat "$scratch/lost.err")" \
    grep -Eq 'error: rank 1 on host .* has waited for [0-9.]+ s in an agreement of all ranks that rank 0 completed' "$scratch/lost.err"
recall broken
ends 60
check "MPI fails on one rank: code 7, not $code" [ "$code" -eq 7 ]
check "one line tells of it" [ "$(grep -c error: "$scratch/broken.err")" -eq 1 ]
check "that rank reports it: $(cat "$scratch/broken.err")" grep -q 'error: .*MPI_Allreduce.*(rank 1 on host' "$scratch/broken.err"
for phase in profile train; do
    recall still-$phase
    ends 40
    check "a rank stands still in $phase: code 7, not $code" [ "$code" -eq 7 ]
    check "one line tells of it" [ "$(grep -c 'error:' "$scratch/still-$phase.err")" -eq 1 ]
    check "it is named: $(grep error: "$scratch/still-$phase.err")" \
        grep -Eq 'error: rank 1 on host .* has not been heard of for [0-9.]+ s; its last activity: (stage 0, .* of step [0-9]+|profiling)' "$scratch/still-$phase.err"
done

# a rank dies in any phase: the job ends, and checkpoints stay
grace=1
start dead-profile 3 --input "$scratch/large.h5" --cluster "$scratch/c.json" --data "$scratch/t.h5" --threads 1 \
    --profile-seconds 60 --output "$scratch/dead-profile"
remember dead-profile
train dead-train --steps 100000 --checkpoint-every 1 --keep 3
remember dead-train
until_true 100 has_checkpoint dead-train
until_true 60 grep -q '^Cluster' "$scratch/dead-profile.out"
for phase in profile train; do
    recall dead-$phase
    kill -KILL "${rank[2]}"
    ends 40
    check "a rank dies in $phase: code $code" [ "$code" -ne 0 ]
done
steps=$(($(ls "$scratch/dead-train/checkpoints" | sed -n 's/^step-0*\([0-9]*\)$/\1/p' | tail -n 1) + 2))
grace=0
train dead-train --resume --steps 100000 --stop-after $steps
ends 100
check "the run goes on from there: code $code" [ "$code" -eq 0 ]

# values that are not finite: no update, the last valid checkpoint stays, and the origin is named
train burst --steps 50 --optimizer sgd --learning-rate 1e6 --lr-schedule constant --clip-norm 0 --checkpoint-every 1
ends 100
check "a loss that is not finite: code 3, not $code" [ "$code" -eq 3 ]
check "one line tells of it" [ "$(grep -c 'error:' "$scratch/burst.err")" -eq 1 ]
check "where it began is named: $(grep error: "$scratch/burst.err")" \
    grep -Eq 'nothing was updated; it began at the (weight|gradient of) [a-z0-9._]+ on rank [0-2] of stage [01]' "$scratch/burst.err"
check "what stands is good" $HAPT export --checkpoint "$scratch/burst" --output "$scratch/burst-weights.h5" >/dev/null

# a signal while the model is measured: no training, code 9. The rank may leave alone, so the others need a moment to say so.
grace=1
start early 3 --input "$scratch/large.h5" --cluster "$scratch/c.json" --data "$scratch/t.h5" --threads 1 --profile-seconds 60 --output "$scratch/early"
until_true 60 grep -q '^Cluster' "$scratch/early.out"
sleep 0.5
kill -USR1 "${rank[2]}"
ends 20
check "asked before training: code 9, not $code" [ "$code" -eq 9 ]
check "one line says so" [ "$(grep -c 'stopped by a signal before training began' "$scratch/early.err")" -eq 1 ]
check "nothing is wrong" [ "$(grep -c 'error:' "$scratch/early.err")" -eq 0 ]

finish
