#!/usr/bin/env bash
# The watch of a run over the lab's trunk. A trunk that drops to a tenth of its rate is reported; a constant one is not. A rank that hangs
# ends the job with one message, and no process is left in any namespace. With HAPT_LONG each many times, on a quiet and on a loaded
# machine.
# Runs beside others: it works on a loaded machine.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1
lab=tests/lab/lab.sh
$lab missing || exit 77

export LAB_DIR=$scratch/lab LAB_HOSTS="a0 b0"
hogs=()
trap 'kill "${hogs[@]}" 2>/dev/null; $lab down; rm -rf "$scratch"' EXIT
$lab up 100mbit || { echo "no lab"; exit 1; }

# start NAME OPTIONS...: training over the trunk, in the background
start() {
    local name=$1
    shift
    timeout --kill-after=10 200 $lab run -host a0:2,b0:2 -np 4 "$HAPT" train --input "$scratch/m.h5" --cluster "$scratch/c.json" --plan "$scratch/plan-$rate.h5" \
        --layers-per-model 6 --threads 1 --checkpoint-every 0 --progress-every 0.05 --output "$scratch/$name" "$@" >"$scratch/$name.out" 2>"$scratch/$name.err" &
    job=$!
}
step_of() { sed -n 's/^hapt: train \([0-9]*\)\/.*/\1/p' "$scratch/$1.err" | tail -n 1; }
# reaches NAME STEP
reaches() {
    local end=$((SECONDS + 60)) step
    while [ $SECONDS -lt $end ] && kill -0 $job 2>/dev/null; do
        step=$(step_of "$1")
        [ "${step:-0}" -ge "$2" ] && return 0
        sleep 0.05
    done
    fail "$1 does not reach step $2: $(tail -n 3 "$scratch/$1.err")"
    return 1
}
named() { grep -o 'warning: step [0-9]*: the link from stage [01].*' "$scratch/$1.err"; }
nothing_left() {
    local left
    for _ in $(seq 100); do
        left=$($lab processes)
        [ -z "$left" ] && break
        sleep 0.1
    done
    check "no process is left in the lab after $1: $left" [ -z "$left" ]
}

cat >"$scratch/c.json" <<'JSON'
{ "format": "hapt-cluster", "version": 1,
  "subclusters": [
    { "name": "fast", "nodes": 1, "devices_per_node": 2, "device": "cpu", "slowdown": 2, "hosts": ["a0"] },
    { "name": "slow", "nodes": 1, "devices_per_node": 2, "device": "cpu", "slowdown": 5, "hosts": ["b0"] } ],
  "links": [ { "between": ["fast", "slow"], "bandwidth": "100 Mbit/s", "latency": "100 us", "transport": "tcp", "interfaces": ["eth0", "eth0"] } ] }
JSON
head -c 100000 src/model/*.c >"$scratch/text.txt"
passes 1 data "$scratch/text.txt" --output "$scratch/t.h5"
passes 1 model gpt --layers 2 --hidden 64 --heads 2 --sequence 64 --vocab 256 --microbatch 4 --data "$scratch/t.h5" --output "$scratch/m.h5"
for rate in 100 ${HAPT_LONG:+300}; do
    sed "s/100 Mbit/$rate Mbit/" "$scratch/c.json" >"$scratch/c-$rate.json"
    passes 1 plan --input "$scratch/m.h5" --cluster "$scratch/c-$rate.json" --predict yes --microbatches 4 --layers-per-model 6 \
        --stages "0-4@fast:1x2,4-8@slow:1x2" --output "$scratch/plan-$rate.h5" || finish
done

# drops NAME: as planned for some steps, then a tenth of the rate
drops() {
    local step line direction
    $lab trunk "${rate}mbit"
    start "$1" --steps 45
    reaches "$1" 20 || return
    $lab trunk "$((rate / 10))mbit"
    step=$(step_of "$1")
    wait $job
    check "$1: code $?" [ $? -eq 0 ]
    for direction in 'stage 0 (subcluster fast, .*) to stage 1 (subcluster slow' 'stage 1 (subcluster slow, .*) to stage 0 (subcluster fast'; do
        line=$(named "$1" | grep "link from $direction.*times as long as the plan assumes .*--resume --replan")
        check "$1: the trunk is named once: $line" [ "$(grep -c . <<<"$line")" -eq 1 ]
        line=$(sed 's/.*step \([0-9]*\):.* takes \([0-9]*\)[.0-9]* times.*/\1 \2/' <<<"$line")
        check "$1: in 20 steps from $step on: $line" [ "${line% *}" -ge "$step" ] && [ "${line% *}" -le $((step + 20)) ]
        check "$1: by about how much: $line" [ "${line#* }" -ge 4 ] && [ "${line#* }" -le 25 ]
    done
}

# stops NAME RANK: the rank is stopped
stops() {
    local process victim="" begun
    start "$1" --steps 1000000 --timeout 8
    reaches "$1" 5 || return
    for process in $($lab processes | awk '$3 ~ /hapt$/ { print $1 }'); do # the rank comes before its sandbox process
        tr '\0' '\n' <"/proc/$process/environ" | grep -qx "OMPI_COMM_WORLD_RANK=$2" && [ -z "$victim" ] && victim=$process
    done
    check "$1: rank $2 is found" [ -n "$victim" ] && kill -STOP "$victim"
    begun=$SECONDS
    wait $job
    check "$1: code 7, not $?" [ $? -eq 7 ]
    check "$1: in bounded time: $((SECONDS - begun)) s" [ $((SECONDS - begun)) -le 20 ]
    check "$1: one line reports it: $(grep error: "$scratch/$1.err")" [ "$(grep -c 'error:' "$scratch/$1.err")" -eq 1 ]
    check "$1: it is named: $(grep error: "$scratch/$1.err")" grep -Eq \
        "error: rank $2 on host [ab]0 has not been heard of for [0-9.]+ s; its last activity: stage [01], [a-z ]+ of step [0-9]+.*; rank [0-9] on host [ab]0 was at: stage [01], " \
        "$scratch/$1.err"
    nothing_left "$1"
}

constant() { # NAME
    $lab trunk "${rate}mbit"
    start "$1" --steps 40
    wait $job
    check "$1: code $?" [ $? -eq 0 ]
    check "$1: the trunk is not named: $(named "$1")" [ -z "$(named "$1")" ]
}

rate=100
drops dropped
stops still 2
if [ -n "${HAPT_LONG:-}" ]; then
    for round in $(seq 10); do
        [ "$round" -eq 6 ] && for _ in 1 2 3; do (exec sh -c 'while :; do :; done') & hogs+=($!); done
        for rate in 100 300; do
            constant "constant-$round-$rate"
            drops "dropped-$round-$rate"
        done
        stops "still-$round" $((round % 4))
    done
fi
finish
