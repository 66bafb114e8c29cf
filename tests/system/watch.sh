#!/usr/bin/env bash
# The watch of a run: requests to stop, and the remaining time.
. tests/system/lib.sh.inc
pids=() guards=() begun=()
trap 'kill -KILL "${pids[@]}" 2>/dev/null; rm -rf "$scratch"' EXIT

# start NAME RANKS ARGUMENTS...: hapt in the background; $launcher is mpirun, ${rank[@]} the processes of the ranks. $grace: seconds that mpirun
# leaves the others when a rank ends with an error (twice; its default is 1). Most runs here end by themselves and need none.
start() {
    local name=$1 ranks=$2
    shift 2
    OMPI_MCA_odls_base_sigkill_timeout=${grace:-0} mpirun --oversubscribe --bind-to none -np "$ranks" "$HAPT" "$@" >"$scratch/$name.out" 2>"$scratch/$name.err" &
    launcher=$! rank=()
    for _ in $(seq 300); do
        read -ra rank < <(cat /proc/$launcher/task/*/children 2>/dev/null | tr '\n' ' ')
        [ ${#rank[@]} -eq "$ranks" ] && break
        sleep 0.05
    done
    guards=()
    for process in "${rank[@]}"; do read -ra children <"/proc/$process/task/$process/children" && guards+=("${children[@]}"); done 2>/dev/null
    pids+=("$launcher" "${rank[@]}")
}
# ends SECONDS: sets $code to the launcher's exit code; no rank may be left
ends() {
    local deadline=$((SECONDS + $1)) left
    while kill -0 "$launcher" 2>/dev/null && [ $SECONDS -lt $deadline ]; do sleep 0.05; done
    check "it ends within $1 s" [ $SECONDS -lt $deadline ]
    kill -KILL "$launcher" 2>/dev/null
    wait "$launcher" 2>/dev/null
    code=$?
    for _ in $(seq 40); do
        # a process that ended but is not collected does not count
        left=$(ps -o stat=,pid= -p "$(echo "${rank[@]}" "${guards[@]}" | tr ' ' ,)" | grep -v '^Z' | tr -d '\n')
        [ -z "$left" ] && break
        sleep 0.05
    done
    check "no process is left" [ -z "$left" ]
}
# One of several jobs: remember NAME, then recall NAME before `ends`.
declare -A job_launcher job_ranks job_guards
remember() { job_launcher[$1]=$launcher job_ranks[$1]="${rank[*]}" job_guards[$1]="${guards[*]}"; }
recall() {
    launcher=${job_launcher[$1]}
    read -ra rank <<<"${job_ranks[$1]}"
    read -ra guards <<<"${job_guards[$1]}"
}
# until_true SECONDS COMMAND...
until_true() {
    local deadline=$((SECONDS + $1))
    shift
    while [ $SECONDS -lt $deadline ]; do
        "$@" && return 0
        sleep 0.02
    done
    fail "waiting for: $*"
    return 1
}
has_checkpoint() { compgen -G "$scratch/$1/checkpoints/step-*" >/dev/null; }
steps_of() { h5dump -H -d /train/loss "$1" | sed -n 's/.*SIMPLE *{ *( *\([0-9]*\).*/\1/p'; }

small_plan
$HAPT model gpt --layers 12 --hidden 384 --heads 6 --sequence 128 --vocab 256 --microbatch 2 --output "$scratch/large.h5" >/dev/null || exit 1
$HAPT data tests/system/train.sh --output "$scratch/t.h5" >/dev/null || exit 1
cluster=$scratch/c.json
common=(--input "$scratch/m.h5" --data "$scratch/t.h5" --threads 1 --layers-per-model 6)
plan=$scratch/plan.h5
train() { # NAME OPTIONS...; $cluster and $plan may be changed
    local name=$1
    shift
    start "$name" 3 train "${common[@]}" --cluster "$cluster" --plan "$plan" --output "$scratch/$name" "$@"
}

# --max-hours: the run stops in time, saves, code 9; the end of a Slurm job is such a limit as well
for limit in hours slurm none; do
    case $limit in
    hours) train hours --steps 100000 --max-hours 0.0025 ;;
    slurm) SLURM_JOB_END_TIME=$(($(date +%s) + 9)) train slurm --steps 100000 ;;
    none) SLURM_JOB_END_TIME=$(date +%s) train none --steps 4 --max-hours 0 ;;
    esac
    remember $limit
    begun[launcher]=$SECONDS
done
for limit in hours slurm none; do
    recall $limit
    ends 200
    case $limit in
    hours) reason='--max-hours' ;;
    slurm) reason='the end of the Slurm job' ;;
    none)
        check "--max-hours 0 is no limit: code $code" [ "$code" -eq 0 ]
        continue
        ;;
    esac
    check "time is up: code 9, not $code" [ "$code" -eq 9 ]
    check "the limit is kept" [ $((SECONDS - begun[launcher])) -le 11 ]
    check "what stopped it is named" grep -q "stopped by $reason after step" "$scratch/$limit.err"
    check "a checkpoint is there" has_checkpoint $limit
done

# ranks and links that are slower than planned; slowed devices leave cores free for this test
sed 's/"device": "cpu"/"device": "cpu", "slowdown": 4/; s/"1 GB\/s"/"10 MB\/s", "paced": true/' "$scratch/c.json" >"$scratch/planned.json"
sed '/"b", "nodes"/s/"slowdown": 4/"slowdown": 20/' "$scratch/planned.json" >"$scratch/rank.json"
sed 's/"10 MB/"1 MB/' "$scratch/planned.json" >"$scratch/link.json"
passes 3 profile --input "$scratch/m.h5" --cluster "$scratch/planned.json" --threads 1 --layers-per-model 6 --profile-seconds 3 --output "$scratch/measured.h5"
$HAPT plan --profile "$scratch/measured.h5" --microbatches 4 --stages "0-4@a:1x2,4-$layers@b:1x1" --output "$scratch/measured-plan.h5" >/dev/null || exit 1
plan=$scratch/measured-plan.h5
for run in planned rank link; do
    cluster=$scratch/$run.json
    train $run --steps 20
    ends 200
    check "$run: code $code" [ "$code" -eq 0 ]
    grep 'warning: step' "$scratch/$run.err" >"$scratch/$run.warnings"
    $HAPT report --input "$scratch/$run/run.h5" >"$scratch/$run.report"
    check "$run: the run file holds the warnings" \
        [ "$(grep -c '^warning ' "$scratch/$run.report")" -eq "$(grep -c . "$scratch/$run.warnings")" ]
done
check "nobody is named where all is as planned: $(cat "$scratch/planned.warnings")" [ ! -s "$scratch/planned.warnings" ]
check "the slow rank is named: $(cat "$scratch/rank.warnings")" \
    grep -Eq 'rank 2 of stage 1 on host .* computes ([3-9]|1[0-4])\.[0-9] times as long .*--resume --replan' "$scratch/rank.warnings"
check "the slow rank alone is named, once" [ "$(grep -c 'computes' "$scratch/rank.warnings")" -eq 1 ]
for direction in 'stage 0 .* to stage 1' 'stage 1 .* to stage 0'; do
    check "the slow link is named once: $direction" [ "$(grep -c "link from $direction .* times as long" "$scratch/link.warnings")" -eq 1 ]
done
check "no rank is named for its link: $(cat "$scratch/link.warnings")" [ "$(grep -c 'computes' "$scratch/link.warnings")" -eq 0 ]
check "every rank's environment is recorded" [ "$(grep -c '^    rank [0-9]*: stage [01], cpu .*cpus [0-9].*pid [0-9]' "$scratch/planned.report")" -eq 3 ]
cluster=$scratch/c.json plan=$scratch/plan.h5

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

# two signals: stops at once, within a step of several seconds
sed 's/"1 GB\/s"/"40 kB\/s", "paced": true/' "$scratch/c.json" >"$scratch/crawl.json"
cluster=$scratch/crawl.json grace=0
train twice --steps 3 --checkpoint-every 1
until_true 60 has_checkpoint twice
kill -USR1 "$launcher"
sleep 1.2
check "the first request waits for the step's end" kill -0 "$launcher"
kill -USR1 "$launcher"
ends 3
check "asked twice: code 138, not $code" [ "$code" -eq 138 ]
check "the checkpoint of the step before stands" [ "$(ls "$scratch/twice/checkpoints")" = step-00000001 ]
cluster=$scratch/c.json

finish
