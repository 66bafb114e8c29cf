#!/usr/bin/env bash
# Devices whose memory holds a data-parallel stage only with the optimizer's state shared out (ZeRO-1): the planner counts on it, the
# trainer does it, and the losses are those of devices with room.
# Runs beside others: it measures no time.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
checks=0 failed=0

check() { # MESSAGE COMMAND...
    local message=$1
    shift
    checks=$((checks + 1))
    "$@" || { echo "failed: $message"; tail -n 3 "$dir/log"; failed=$((failed + 1)); }
}

cluster() { # BYTES
    printf '{ "format": "hapt-cluster", "version": 1, "subclusters": [
        { "name": "cpu", "nodes": 1, "devices_per_node": 2, "device": "cpu", "memory": "%s MB" } ] }' "$1" >"$dir/cluster.json"
}

plan() { # OPTIONS...: bytes per device of the plan
    "$HAPT" plan --input "$dir/m.h5" --cluster "$dir/cluster.json" --threads 1 --program data --microbatches 2 --stages "0-8@cpu:1x2" --json "$@" \
        2>"$dir/log" | python3 -c 'import json, sys; print(int(json.load(sys.stdin)["stages"][0]["memory_bytes"]))' 2>>"$dir/log"
}

train() { # NAME OPTIONS...
    local name=$1
    shift
    mpirun --oversubscribe --bind-to none -np 2 "$HAPT" --input "$dir/m.h5" --cluster "$dir/cluster.json" --threads 1 --program data --microbatches 2 \
        --predict yes --stages "0-8@cpu:1x2" --steps 3 --output "$dir/$name" "$@" >"$dir/log" 2>&1
}

loss() { h5dump -y -m "%.17g" -d /train/loss "$dir/$1/run.h5" | sed -n '/DATA {/,/}/p'; }

head -c 20000 src/model/ops.c >"$dir/text"
"$HAPT" data "$dir/text" --type bytes --output "$dir/tokens.h5" >/dev/null || exit 1
"$HAPT" model gpt --layers 2 --hidden 128 --heads 4 --sequence 32 --vocab 256 --microbatch 2 --data "$dir/tokens.h5" \
    --output "$dir/m.h5" >/dev/null || exit 1

cluster 1000
whole=$(plan --sharded-optimizer no)
sharded=$(plan --sharded-optimizer yes)
check "room: whole state, as without sharding" [ "$(plan)" = "$whole" ]
check "two ranks save half of the two moments: $whole and $sharded" \
    awk -v whole="$whole" -v sharded="$sharded" 'BEGIN { exit !(whole - sharded > 1.5e6 && sharded > whole / 2) }'
check "training with room" train room

cluster "$(awk -v whole="$whole" -v sharded="$sharded" 'BEGIN { printf "%.6f", (whole + sharded) / 2e6 }')"
check "scarce: auto counts on shared state" [ "$(plan)" = "$sharded" ]
check "training there" train scarce
check "equal losses" [ "$(loss room)" = "$(loss scarce)" ]
"$HAPT" plan --input "$dir/m.h5" --cluster "$dir/cluster.json" --threads 1 --program data --microbatches 2 --stages "0-8@cpu:1x2" \
    --sharded-optimizer no >"$dir/log" 2>&1
code=$?
check "whole state does not fit (exit code $code)" [ $code -ne 0 ]
echo "$checks checks, $failed failed"
exit $((failed > 0))
