#!/usr/bin/env bash
# hapt train and hapt export from the command line: a plan from a file, schedules, a signal, resuming, refusals.
# Runs beside others
. tests/system/lib.sh.inc
dir=$scratch
mpirun="mpirun --oversubscribe --bind-to none"
reference=tests/data/gpt-small.h5
losses() { grep -o '"loss": \[[^]]*\]' "$1"; }
small_plan --dtype fp32 --tied-embeddings yes --weights $reference

data=$reference cluster=$dir/c.json
train() { # NAME OPTIONS...; $data and $cluster may be changed
    local name=$1
    shift
    (exec $mpirun -np 4 "$HAPT" train --input "$dir/m.h5" --cluster "$cluster" --data "$data" --threads 1 \
        --layers-per-model 6 --learning-rate 1e-3 --lr-schedule constant --clip-norm 0 \
        --output "$dir/$name" --json "$@" >"$dir/$name.json" 2>"$dir/$name.log")
}

train whole --plan "$dir/plan.h5" --steps 20
check "training ends well" [ $? -eq 0 ]
check "the first loss is PyTorch's" grep -q '"loss": \[5.6045' "$dir/whole.json"
for schedule in gpipe 1f1b eager1f1b; do
    train $schedule --plan "$dir/plan.h5" --steps 20 --schedule $schedule
    check "$schedule gives the same bits" [ "$(losses "$dir/$schedule.json")" = "$(losses "$dir/whole.json")" ]
done

train halves --plan "$dir/plan.h5" --steps 20 --stop-after 7 --checkpoint-every 3
check "stopping early ends well" [ $? -eq 0 ]
check "two checkpoints are kept" [ "$(ls "$dir/halves/checkpoints" | tr '\n' ' ')" = "step-00000006 step-00000007 " ]
train halves --steps 20 --resume --schedule gpipe
check "another schedule is refused on resuming" [ $? -eq 2 ]
check "the kept schedule is named" grep -q 'error: --resume keeps the checkpoint.s schedule h1f1b' "$dir/halves.log"
train halves --steps 20 --resume --optimizer sgd --momentum 0.9
check "another optimizer is refused on resuming" [ $? -eq 2 ]
check "the states it lacks are named" grep -q 'error: checkpoint .* holds 2 optimizer states' "$dir/halves.log"
train halves --steps 20 --resume --schedule h1f1b
check "resuming ends well" [ $? -eq 0 ]
check "resuming gives the same bits" [ "$(losses "$dir/halves.json")" = "$(losses "$dir/whole.json")" ]

# damage: the checkpoint before is used, with a warning
echo damage >>"$dir/halves/checkpoints/step-00000020/shard-0001.h5"
train halves --steps 20 --resume
check "a damaged checkpoint is passed over" [ $? -eq 0 ]
check "the damaged one is named" grep -q 'step-00000020 is damaged' "$dir/halves.log"
check "the bits are the same again" [ "$(losses "$dir/halves.json")" = "$(losses "$dir/whole.json")" ]

# a signal: the step ends, a checkpoint is written, code 9; then the run resumes
$HAPT data tests/system/train.sh --output "$dir/t.h5" >/dev/null || exit 1
data=$dir/t.h5
train signal --plan "$dir/plan.h5" --steps 100000 --checkpoint-every 5 &
for _ in $(seq 900); do
    compgen -G "$dir/signal/checkpoints/step-*" >/dev/null && break
    sleep 0.1
done
kill -USR1 $(cat /proc/$!/task/$!/children) # mpirun is the child of the background shell
wait $!
check "a signal leaves with code 9" [ $? -eq 9 ]
check "a signal leaves a checkpoint" grep -q '"stopped": true' "$dir/signal.json"
done_steps=$(sed -n 's/.*"steps": \([0-9]*\),.*/\1/p' "$dir/signal.json")
train signal --steps 100000 --resume --stop-after $((done_steps + 2))
check "the stopped run goes on" grep -q "\"first_step\": $done_steps," "$dir/signal.json"


# a rank that hangs: its peers time out and print what they waited for
train hang --plan "$dir/plan.h5" --steps 100000 --checkpoint-every 5 --timeout 2 &
for _ in $(seq 200); do
    compgen -G "$dir/hang/checkpoints/step-*" >/dev/null && break
    sleep 0.1
done
launcher=$(cat /proc/$!/task/$!/children)
victim=$(cat /proc/${launcher% }/task/*/children | tr ' ' '\n' | sed -n 2p)
kill -STOP "$victim"
wait $!
check "a hanging rank ends the job with code 7" [ $? -eq 7 ]
kill -CONT "$victim" 2>/dev/null
# a rank that stops inside an agreement or a checkpoint is reported as missing
check "the time-out names who waited for what" grep -Eq \
    'error: ((stage|rank) [0-9]+ waited [0-9.e+]+ s for .*(step|last messages|checkpoint)|a rank did not reach the end of the phase|rank [0-9]+ on host [^ ]+ has not been heard of .*step)' "$dir/hang.log"
[ $failures -eq 0 ] || grep error "$dir/hang.log"
data=$reference

# weights
$HAPT export --checkpoint "$dir/whole" --output "$dir/w.h5" >/dev/null
check "export ends well" [ $? -eq 0 ]
check "exported weights carry the family's names" \
    grep -q '( 64, 192 )' <(h5dump -H -d /parameters/h.1.attn.c_attn.weight "$dir/w.h5")

# one error line, a hint, the right code
refused() { # CODE WHAT OPTIONS...
    local code=$1 what=$2
    shift 2
    OMPI_MCA_odls_base_sigkill_timeout=0 train refused "$@" # all ranks end by themselves: mpirun need not wait before it kills them
    local got=$?
    check "$what: code $code, not $got" [ $got -eq "$code" ]
    check "$what: one error line" [ "$(grep -c '^hapt: error:' "$dir/refused.log")" -eq 1 ]
    check "$what: a hint" grep -q '^hint:' "$dir/refused.log"
}
refused 2 "no plan" --steps 2
refused 3 "a missing plan" --steps 2 --plan "$dir/nowhere.h5"
refused 3 "a wrong number of rows" --steps 2 --plan "$dir/plan.h5" --microbatches 3
refused 3 "too few batches" --steps 21 --plan "$dir/plan.h5"
refused 3 "nothing to resume" --steps 2 --resume

# another model than the checkpoint's, a file in place of a checkpoint, data that do not fit: reported at once with the reason
says() { # CODE PATTERN OPTIONS...
    local code=$1 pattern=$2
    shift 2
    "$HAPT" "$@" >"$dir/said.out" 2>"$dir/said.log"
    local got=$?
    check "$*: code $code, not $got" [ $got -eq "$code" ]
    check "$*: $pattern" grep -Eq "^hapt: error: .*$pattern" "$dir/said.log"
    check "$*: a hint" grep -q '^hint:' "$dir/said.log"
}
for other in "--layers 2 --hidden 32" "--layers 1 --hidden 64" "--layers 3 --hidden 64"; do
    "$HAPT" model gpt $other --heads 4 --sequence 64 --vocab 256 --microbatch 2 --output "$dir/other.h5" >/dev/null || exit 1
    says 3 'checkpoint .*/step-00000020 belongs to another model: it(s| has)' --input "$dir/other.h5" --data $reference --resume --output "$dir/whole"
done
says 3 'run.h5 is a file; a checkpoint is a folder' export --checkpoint "$dir/whole/run.h5" --output "$dir/none.h5"
says 3 'there is no checkpoint in' export --checkpoint "$dir/nowhere" --output "$dir/none.h5"
says 3 'rows' --input "$dir/m.h5" --data $reference --microbatches 3 --steps 2 --output "$dir/none"
says 3 'cannot open .*nowhere.h5' --input "$dir/m.h5" --data "$dir/nowhere.h5" --steps 2 --output "$dir/none"
check "data are looked at before anything is profiled" [ -z "$(grep -h 'layers\|Profile' "$dir/said.out" "$dir/said.log")" ]

sed 's/300 MB/1 MB/' "$dir/c.json" >"$dir/small.json"
cluster=$dir/small.json
refused 5 "a plan over the cap" --steps 2 --plan "$dir/plan.h5"

finish
