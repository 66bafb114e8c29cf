#!/usr/bin/env bash
# --precision: the choice on CPUs, on GPUs (the host CUDA) and on paper; the record in plans, profiles and checkpoints; binding.
# Runs beside others: it measures no time.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1
gpt=(gpt --layers 2 --hidden 32 --heads 2 --sequence 16 --vocab 64 --microbatch 2)
m=$scratch/m.h5 b=$scratch/b.h5
seq -f 'line %03g of a text that is long enough' 200 | tr -dc '\0-\77' >"$scratch/text" # only bytes below the vocabulary
passes 1 data "$scratch/text" --output "$scratch/t.h5"
passes 1 model "${gpt[@]}" --data "$scratch/t.h5" --output "$m"
passes 1 model "${gpt[@]}" --data "$scratch/t.h5" --dtype bf16 --output "$b"
run() { # NAME ARGUMENTS...: three steps
    local name=$1
    shift
    passes 1 --input "$m" --microbatches 2 --steps 3 --predict --output "$scratch/$name" "$@"
}
losses() { h5dump -d /train/loss -m %.9g "$scratch/$1/run.h5" | sed -n '/DATA/,$p'; }
of() { h5dump -a "$2" "$1" 2>/dev/null | sed -n 's/.*(0): "\(.*\)".*/\1/p'; }
same() { [ -n "$1" ] && [ "$1" = "$2" ]; }
differ() { [ -n "$1" ] && [ "$1" != "$2" ]; }

# 1. CPUs: the model's own precision, or the requested one; unsupported ones.
run own
run single --precision fp32
run half --precision bf16
passes 1 --input "$b" --microbatches 2 --steps 3 --predict --output "$scratch/made"
check "a CPU keeps the model's type" same "$(losses own)" "$(losses single)"
check "--precision bf16 is a model in bf16" same "$(losses half)" "$(losses made)"
check "bf16 is not fp32" differ "$(losses half)" "$(losses own)"
check "the plan records it" same "$(of "$scratch/half/run.h5" /plan/precision)-$(of "$scratch/half/run.h5" /plan/boundary_dtype)" bf16-bf16
refuses 3 'fp16, which cpu does not have' 1 --input "$m" --precision fp16 --output "$scratch/no"
refuses 3 'tf32, which cpu does not have' 1 --input "$m" --precision tf32 --output "$scratch/no"

# 2. On paper: the precision of the described devices.
plan() { # A100S V100S OPTIONS...: precision and boundary type of the plan, its seconds
    local a=$1 v=$2 list=
    shift 2
    [ "$a" = 0 ] || list="{ \"name\": \"a\", \"nodes\": $a, \"devices_per_node\": 1, \"device\": \"A100-40GB\" }"
    [ "$v" = 0 ] || list="${list:+$list, }{ \"name\": \"v\", \"nodes\": $v, \"devices_per_node\": 1, \"device\": \"V100-16GB\" }"
    echo "{ \"format\": \"hapt-cluster\", \"version\": 1, \"subclusters\": [ $list ] }" >"$scratch/paper.json"
    on 1 plan --input "$m" --cluster "$scratch/paper.json" --microbatches 4 --json "$@" 2>"$scratch/err" | /usr/bin/python3 -c '
import json, sys
plan = json.load(sys.stdin)
print(plan["precision"], plan["boundary_dtype"], plan["profile"])'
}
check "A100s on paper" same "$(plan 2 0)" "bf16 bf16 predicted"
check "A100 and V100 on paper" same "$(plan 1 1)" "fp16 fp16 predicted"
check "... with a message" grep -q 'V100-16GB has no bf16' "$scratch/err"
check "fp32 on paper" same "$(plan 1 1 --precision fp32)" "fp32 fp32 predicted"
check "TF32 on paper" same "$(plan 1 1 --precision tf32)" "tf32 fp32 predicted"
check "... with a message if a GPU has no TF32" grep -q 'V100-16GB has no TF32' "$scratch/err"
check "emulated GPUs are GPUs" same "$(plan 1 1 --device emulated)" "fp16 fp16 predicted"
check "GPUs that CPUs stand in for count as CPUs" same "$(plan 1 1 --device cpu --predict)" "fp32 fp32 predicted"
refuses 3 'bf16, which V100-16GB does not have' 1 plan --input "$m" --cluster "$scratch/paper.json" --precision bf16
plan 0 1 >/dev/null
refuses 3 'tf32, which V100-16GB does not have' 1 plan --input "$m" --cluster "$scratch/paper.json" --precision tf32

# 3. Files record the precision.
plan 1 1 --output "$scratch/paper.h5" >/dev/null
passes 1 profile --input "$m" --cluster "$scratch/paper.json" --precision fp32 --output "$scratch/p.h5" && grep -q 'in fp32, predicted' "$scratch/out" ||
    fail "the profile's table does not tell that it is predicted"
check "the profile records it" same "$(of "$scratch/p.h5" /precision)-$(of "$scratch/p.h5" /origin)" fp32-predicted
passes 1 plan --profile "$scratch/p.h5" --output "$scratch/q.h5"
check "its plan records it" same "$(of "$scratch/q.h5" /precision)-$(of "$scratch/q.h5" /boundary_dtype)-$(of "$scratch/q.h5" /profile)" fp32-fp32-predicted
refuses 2 'precision has no effect' 1 plan --profile "$scratch/p.h5" --precision fp32
passes 1 plan --profile "$scratch/p.h5" --input "$m" && grep -q ', fp32' "$scratch/out" || fail "the plan of a profile in fp32"
refuses 2 'is a profile in fp32' 1 plan --profile "$scratch/p.h5" --input "$m" --precision fp16

host=$HAPT_BUILD/tests/gpu/hapt-cuda-host.so
[ -e "$host" ] || finish
export HAPT_CUDA_PLUGIN=$host HAPT_HOST_GPUS=2
gpu() { # HALF-TYPE: a GPU that has it
    echo "{ \"format\": \"hapt-cluster\", \"version\": 1, \"subclusters\": [ { \"name\": \"g\", \"nodes\": 1, \"devices_per_node\": 1, \"device\":
        { \"name\": \"test\", \"backend\": \"cuda\", \"peak_flops\": { \"fp32\": 1e13, \"$1\": 1e14 }, \"memory\": \"1 GB\", \"memory_bandwidth\": 1e12 }${2:-} } ] }" \
        >"$scratch/gpu-$1.json"
}
gpu bf16
gpu fp16
# 4. GPUs: 16 bits by default; resumed runs keep their type.
on_gpu() { # NAME TYPE ARGUMENTS...
    local name=$1 type=$2
    shift 2
    run "$name" --cluster "$scratch/gpu-$type.json" "$@"
}
on_gpu g-auto bf16
check "a GPU with bf16" same "$(of "$scratch/g-auto/run.h5" /plan/precision)" bf16
on_gpu g-fp16 fp16
check "a GPU without it" same "$(of "$scratch/g-fp16/run.h5" /plan/precision)" fp16
on_gpu g-fp32 bf16 --precision fp32
on_gpu g-tf32 bf16 --precision tf32
check "TF32 is near fp32, not the same" differ "$(losses g-tf32)" "$(losses g-fp32)"
on_gpu again bf16 --precision fp32 --stop-after 1
on_gpu again bf16 --resume yes
check "a resumed run keeps its type" same "$(losses again)" "$(losses g-fp32)"
on_gpu g-stop bf16 --stop-after 1
on_gpu g-stop bf16 --resume yes --precision fp32 && grep -q 'was made for bf16, the model computes in fp32' "$scratch/err" || fail "resuming in another type gives no message"
on_gpu g-half fp16 --stop-after 1
go_on=(--input "$m" --steps 3 --microbatches 2 --resume yes --output "$scratch/g-half")
refuses 3 'the checkpoint was trained in fp16, which test does not have' 1 "${go_on[@]}" --cluster "$scratch/gpu-fp16.json" --device cpu
refuses 3 'stage 0 uses subcluster g' 1 "${go_on[@]}" # this machine's GPU belongs to another subcluster
check "... with advice" grep -q '^hint: .*--replan' "$scratch/err"
passes 1 "${go_on[@]}" --replan --precision bf16 --device cpu --cluster "$scratch/gpu-fp16.json"
passes 1 plan --input "$m" --cluster "$scratch/gpu-bf16.json" --predict --precision fp32 --output "$scratch/g.h5"
given=(train --input "$m" --plan "$scratch/g.h5" --cluster "$scratch/gpu-bf16.json" --steps 3)
passes 1 "${given[@]}" --output "$scratch/given"
check "a plan in fp32 trains in fp32" same "$(of "$scratch/given/run.h5" /plan/precision)" fp32
on_gpu g-cpu bf16 --device cpu
check "--device cpu keeps the model's type" same "$(losses g-cpu)" "$(losses own)"

# 5. The memory limit of a cluster file applies to GPUs.
gpu bf16 ', "memory": "100 kB"'
refuses 5 'of its 100000 bytes are left' 1 "${given[@]}" --output "$scratch/no"

# 6. Ranks run near their GPUs: on a machine where threads 0 and 1 are two sockets with a GPU each.
bound() { # ARGUMENTS...: threads of the two ranks
    timeout 100 ${launcher:-} mpirun --oversubscribe --bind-to none -np 2 -x "HWLOC_XMLFILE=$PWD/tests/data/two-halves.xml" -x HWLOC_THISSYSTEM=1 "$HAPT" --input "$m" \
        --microbatches 2 --steps 1 --predict --overwrite --output "$scratch/bound" "$@" >"$scratch/out" 2>"$scratch/err"
    h5dump -d /environment/cpus "$scratch/bound/run.h5" | sed -n 's/.*(0): //p'
}
if [ "$(taskset -c 0,1 nproc 2>/dev/null)" = 2 ]; then
    check "ranks near their GPUs" same "$(bound)" '"0", "1"'
    check "... with a message" grep -q '2 ranks are bound to cores near their GPUs' "$scratch/err"
    check "--bind no" differ "$(bound --bind no)" '"0", "1"'
    check "ranks on CPUs in their NUMA nodes" same "$(bound --device cpu)" '"0", "1"'
    check "... with a message" grep -q '2 ranks are bound to the cores of their NUMA nodes' "$scratch/err"
    check "--bind no on CPUs" same "$(bound --device cpu --bind no)" '"0-1", "0-1"'
    check "bound by the launcher" same "$(launcher="taskset -c 1" bound --device cpu)" '"1", "1"'
    check "... and not a second time" [ "$(grep -c 'are bound to' "$scratch/err")" -eq 0 ]
fi

# 6b. A host with two kinds of GPU is two subclusters: it is found, trained on, and trained on again from the cluster file.
kinds() { # ARGUMENTS...
    timeout 100 mpirun --oversubscribe --bind-to none -np 4 -x HAPT_HOST_GPUS=4 -x "HAPT_HOST_NAMES=Kind A,Kind B" "$HAPT" "$@" >"$scratch/out" 2>"$scratch/err"
}
ranks_of() { sed -n 's/^  \(kind-[ab]\) *1 x 2 .* \([0-9,-]*\)$/\1: \2/p' "$scratch/err" | tr '\n' ';'; }
kinds topology --json && cp "$scratch/out" "$scratch/kinds.json"
check "two kinds of GPU" same "$(ranks_of)" "kind-a: 0,2;kind-b: 1,3;"
kinds topology --cluster "$scratch/kinds.json" --json
check "... from their file" same "$(ranks_of)" "kind-a: 0,2;kind-b: 1,3;"
kinds --input "$m" --microbatches 2 --steps 2 --predict --stages "0-1@kind-a:1x1,1-$("$HAPT" plan --input "$m" --cluster "$scratch/kinds.json" --predict yes \
    --stages "0-1@kind-a:1x1" 2>&1 | sed -n 's/.*layer 1 of //p')@kind-b:1x1" --output "$scratch/kinds"
check "training on both: $(tail -n 2 "$scratch/err")" [ -s "$scratch/kinds/run.h5" ]

# 7. Tokens outside the vocabulary are found before the model is profiled.
passes 1 model "${gpt[@]/64/40}" --output "$scratch/few.h5"
refuses 3 'outside the model.s vocabulary of 40' 1 --input "$scratch/few.h5" --data "$scratch/t.h5" --steps 1 --output "$scratch/no"
check "before its layers" [ "$(grep -c 'share of FLOPs' "$scratch/out")" -eq 0 ]

# 8. If GPUs are required, all devices must be GPUs.
passes 1 --input "$m" --microbatches 2 --steps 1 --predict --device cuda --output "$scratch/cuda"
unset HAPT_CUDA_PLUGIN
refuses 3 'no GPU can be used here: ' 1 --input "$m" --device cuda --output "$scratch/no"
check "... with advice" grep -q '^hint: .*--device cpu' "$scratch/err"
refuses 3 'the devices of subcluster .* are cpu' 4 --input "$m" --device cuda --cluster inputs/two-subclusters.json --output "$scratch/no"
finish
