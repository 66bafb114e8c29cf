#!/usr/bin/env bash
# Tensor-parallel stages from the command line: in bf16 with sharded optimizer state, with fewer key-value heads than ranks, and with a rank
# that is killed, or hangs, between two collectives.
# Runs beside others: it measures no time.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1
options=(--microbatches 4 --learning-rate 1e-3 --lr-schedule constant --threads 1 --timeout 2)

for ranks in 2 4; do
    printf '{"format":"hapt-cluster","version":1,"subclusters":[{"name":"cpu","nodes":1,"devices_per_node":%d,"device":"cpu"}]}' $ranks \
        >"$scratch/c$ranks.json"
done
plan() { # RANKS MODEL STAGES: "$scratch/plan.h5"; L is the model's number of layers
    local layers=$3
    [[ $3 == *L* ]] && layers=${3//L/$("$HAPT" plan --input "$2" --cluster "$scratch/c$1.json" --stages "0-1@cpu:1x1" 2>&1 | sed -n 's/.*layer 1 of //p')}
    passes 1 plan --input "$2" --cluster "$scratch/c$1.json" --microbatches 4 --stages "$layers" --output "$scratch/plan.h5"
}
losses() { grep -o '"loss": \[[^]]*\]' "$1" | grep -oE '[0-9.]+(e-?[0-9]+)?'; }
same() { # WHAT TOLERANCE: the losses just printed are those of one rank
    checks=$((checks + 1))
    losses "$scratch/out" >"$scratch/its"
    local worst
    worst=$(paste "$scratch/one" "$scratch/its" | awk 'NF != 2 { bad = 1 } { d = ($1 - $2) / $1; if (d < 0) d = -d; if (d > worst) worst = d }
        END { print bad || NR == 0 ? 1 : worst + 0 }')
    awk -v worst="$worst" -v most="$2" 'BEGIN { exit !(worst <= most) }' || fail "$1: losses are $worst away"
    echo "$1: losses within $worst"
}

# bf16: a number has 8 bits (4e-3); a loss averages over 512 of them per step, and 20 steps enlarge the differences
"$HAPT" model gpt --layers 2 --hidden 64 --heads 4 --sequence 64 --vocab 256 --microbatch 2 --dtype bf16 --tied-embeddings yes \
    --weights tests/data/gpt-small.h5 --output "$scratch/half.h5" >/dev/null || exit 1
half=(--input "$scratch/half.h5" --data tests/data/gpt-small.h5 --steps 20 "${options[@]}" --json)
passes 1 "${half[@]}" --profile-seconds 1 --overwrite --output "$scratch/one-half" && losses "$scratch/out" >"$scratch/one"
for stages in "0-L@cpu:1x2t2" "0-4@cpu:1x2t2,4-L@cpu:1x2" "0-L@cpu:1x4t2"; do
    ranks=4
    [ "$stages" = "0-L@cpu:1x2t2" ] && ranks=2
    plan $ranks "$scratch/half.h5" "$stages"
    passes $ranks "${half[@]}" --plan "$scratch/plan.h5" --cluster "$scratch/c$ranks.json" --sharded-optimizer yes --replica-check 1 --overwrite --output "$scratch/half" &&
        same "bf16, sharded optimizer state, $stages" 5e-4
done

# Every family of blocks, and one key-value head for two and for four ranks.
shared() { # FAMILY RANKS OPTIONS...: PyTorch's initial weights where the shape is the reference's
    local family=$1 ranks=$2
    shift 2
    "$HAPT" model "$family" "$@" --microbatch 2 --dtype fp32 --output "$scratch/model.h5" >/dev/null || { fail "no model of $family"; return; }
    local run=(--input "$scratch/model.h5" --data "tests/data/$family-small.h5" --steps 5 "${options[@]}" --json)
    passes 1 "${run[@]}" --profile-seconds 1 --overwrite --output "$scratch/one-$family" && losses "$scratch/out" >"$scratch/one"
    plan "$ranks" "$scratch/model.h5" "0-L@cpu:1x${ranks}t$ranks"
    passes "$ranks" "${run[@]}" --plan "$scratch/plan.h5" --cluster "$scratch/c$ranks.json" --replica-check 2 --overwrite --output "$scratch/$family" &&
        same "$family, $ranks ranks share each operator${3:+ (${*: -2})}" 1e-5
}
shared llama 2 --layers 2 --hidden 64 --heads 4 --ffn 160 --sequence 32 --vocab 128 --kv-heads 2
shared llama 2 --layers 2 --hidden 64 --heads 4 --ffn 160 --sequence 32 --vocab 128 --kv-heads 1
shared llama 4 --layers 2 --hidden 64 --heads 4 --ffn 160 --sequence 32 --vocab 128 --kv-heads 1
shared bert 2 --layers 2 --hidden 48 --heads 4 --sequence 32 --vocab 120
shared bert-moe 2 --layers 2 --hidden 32 --heads 4 --sequence 24 --vocab 96 --experts 5
shared vit 2 --layers 2 --hidden 48 --heads 4 --image 16 --patch 4 --classes 7

# The second of two ranks gets a signal while they train. A step is full of collectives of the two.
"$HAPT" data tests/system/train.sh --output "$scratch/stream.h5" >/dev/null || exit 1
"$HAPT" model gpt --layers 2 --hidden 64 --heads 4 --sequence 64 --vocab 256 --microbatch 2 --output "$scratch/gpt.h5" >/dev/null || exit 1
plan 2 "$scratch/gpt.h5" "0-L@cpu:1x2t2"
strike() { # SIGNAL: sets code
    rm -rf "$scratch/struck"
    mpirun --oversubscribe --bind-to none -np 2 "$HAPT" train --input "$scratch/gpt.h5" --data "$scratch/stream.h5" --steps 1000000 "${options[@]}" \
        --cluster "$scratch/c2.json" --plan "$scratch/plan.h5" --checkpoint-every 5 --output "$scratch/struck" >"$scratch/out" 2>"$scratch/err" &
    local launcher=$! victim
    for _ in $(seq 300); do
        compgen -G "$scratch/struck/checkpoints/step-*" >/dev/null && break
        sleep 0.1
    done
    victim=$(cat /proc/$launcher/task/*/children | tr ' ' '\n' | sed -n 2p)
    kill "-$1" "$victim"
    (sleep 60; kill -KILL $launcher) 2>/dev/null &
    local watch=$!
    wait $launcher
    code=$?
    kill $watch 2>/dev/null
    kill -CONT "$victim" 2>/dev/null
}
checks=$((checks + 5))
strike STOP
[ "$code" -eq 7 ] || fail "a hanging rank of a tensor-parallel stage: code $code, not 7: $(cat "$scratch/err")"
[ "$(grep -c '^hapt: error:' "$scratch/err")" -eq 1 ] || fail "a hanging rank: not one error line: $(cat "$scratch/err")"
grep -Eq 'error: ((stage|rank) [0-9]+ waited [0-9.]+ s|a rank did not reach the end of the phase|rank 1 on host .* has not been heard of)' "$scratch/err" ||
    fail "a hanging rank: nobody says for what was waited: $(cat "$scratch/err")"
strike KILL
case $code in 137 | 7) ;; *) fail "a killed rank: code $code, neither mpirun's 137 nor 7" ;; esac
[ "$(grep -c '^hapt: error:' "$scratch/err")" -le 1 ] || fail "a killed rank: several error lines: $(cat "$scratch/err")"
finish
