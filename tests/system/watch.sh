#!/usr/bin/env bash
# The watch of a run, where time counts: the remaining time, ranks and links slower than planned, two requests to stop.
. tests/system/lib.sh.inc
. tests/system/watch.sh.inc

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
watched() { # RUN
    cluster=$scratch/$1.json
    train "$1" --steps 20 --overwrite
    ends 200
    check "$1: code $code" [ "$code" -eq 0 ]
    grep 'warning: step' "$scratch/$1.err" >"$scratch/$1.warnings"
    $HAPT report --input "$scratch/$1/run.h5" >"$scratch/$1.report"
    check "$1: the run file holds the warnings" \
        [ "$(grep -c '^warning ' "$scratch/$1.report")" -eq "$(grep -c . "$scratch/$1.warnings")" ]
}
watched planned
watched rank
# More time is tolerated while other work shares the cores (SLICES_S in watch_slow.c), up to all that this link lacks: one of three runs counts.
for _ in 1 2 3; do
    watched link
    [ "$(grep -c 'link from .* times as long' "$scratch/link.warnings")" -eq 2 ] && break
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
