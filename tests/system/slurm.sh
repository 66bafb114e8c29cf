#!/usr/bin/env bash
# Runs beside others: it measures no time.
# jobs/two-subclusters.slurm on the lab's Slurm. A signal stops a heterogeneous job; it writes a checkpoint, requeues itself and resumes.
# Its losses are those of an undisturbed run, bit by bit. Submitted again, it has nothing to do.
# jobs/gpt39b.slurm of an installation, without arguments: it plans, rehearses, and says which data to give.
# With HAPT_LONG also the signal that Slurm itself sends before the time limit. Then README.md's and docs/slurm.md's commands for Slurm run as they
# stand there, except for jobs/gpt39b.slurm, which asks for 64 GPUs.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1
slurm=$PWD/tests/lab/slurm.sh
$slurm missing || exit 77

export CLUSTER=inputs/two-hosts.json LAB_DIR=$scratch/lab RUN=$scratch/run SBATCH_OUTPUT=$scratch/log POLL_S=1
trap '$slurm down; rm -rf "$scratch"' EXIT
$slurm up 500mbit || { echo "no Slurm"; exit 1; }

head -c 100000 src/model/*.c >"$scratch/text.txt"
passes 1 data "$scratch/text.txt" --output "$scratch/tokens.h5"
passes 1 model gpt --layers 4 --hidden 64 --heads 2 --sequence 32 --vocab 256 --microbatch 2 --tied-embeddings yes --data "$scratch/tokens.h5" \
    --output "$scratch/m.h5"
passes 1 plan --input "$scratch/m.h5" --cluster inputs/two-hosts.json --predict yes --microbatches 4 --layers-per-model 6 --json \
    --stages "0-2@slow:1x2,2-6@fast:1x2" --output "$scratch/plan.h5"
options="--plan $scratch/plan.h5 --layers-per-model 6 --threads 1"

submit() { # OPTIONS OF SBATCH -- OPTIONS OF HAPT
    local sbatch=()
    while [ "$1" != -- ]; do sbatch+=("$1"); shift; done
    shift
    # shellcheck disable=SC2086
    $slurm on sbatch --parsable "${sbatch[@]}" jobs/two-subclusters.slurm "$scratch/m.h5" $options "$@"
}
value() { $slurm on scontrol show job "$1" | tr ' ' '\n' | sed -n "s/^ *$2=//p" | head -n 1; }
wait_until() { # SECONDS COMMAND...
    local end=$((SECONDS + $1))
    shift
    while [ $SECONDS -lt $end ]; do
        "$@" && return 0
        sleep 0.2
    done
    return 1
}
has_checkpoint() { compgen -G "$RUN/checkpoints/step-*/manifest.h5" >/dev/null; }
over() { [[ $(value "$1" JobState) =~ COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL ]]; }
ends_well() { # JOB RESTARTS
    checks=$((checks + 2))
    wait_until 90 over "$1" || fail "job $1 does not end: $(value "$1" JobState); $(tail -n 5 "$scratch/log")"
    [ "$(value "$1" JobState)" = COMPLETED ] || fail "job $1 is $(value "$1" JobState): $(tail -n 5 "$scratch/log")"
    [ "$(value "$1" Restarts)" = "$2" ] || fail "job $1 was restarted $(value "$1" Restarts) times, not $2"
}

# 1. Stopped during the run. Slurm's PMIx can lose the first connection of a process, which then dies before MPI has started (seen once in
# dozens of runs). Such a job is submitted once more.
job=$(submit -- --steps 120)
checks=$((checks + 4))
lost() { grep -qs 'PMIX ERROR: UNREACHABLE' "$scratch/log"; }
begun() { has_checkpoint || lost; }
wait_until 60 begun
if lost && ! has_checkpoint; then
    echo "PMIx lost a process: $(grep -m 1 'PMIX ERROR' "$scratch/log")"
    $slurm on scancel "$job"
    wait_until 60 over "$job"
    rm -rf "$RUN" "$scratch/log"
    job=$(submit -- --steps 120)
fi
wait_until 60 has_checkpoint || fail "no checkpoint: $(grep -m 3 "hapt: error" "$scratch/log"; tail -n 20 "$scratch/log")"
$slurm on scancel --signal=USR1 "$job"
ends_well "$job" 1
grep -q 'hapt: stopped by a signal after step' "$scratch/log" || fail "no word of the signal in the log"
grep -q 'resuming after step' "$scratch/log" || fail "no word of resuming in the log"
[ "$(grep -c 'fast - slow' "$scratch/log")" = 2 ] || fail "the link of the subclusters was not measured in both runs"

# 2. Undisturbed.
# shellcheck disable=SC2086
tests/lab/lab.sh run -host a0:2,b0:2 -np 4 "$HAPT" --input "$scratch/m.h5" --cluster inputs/two-hosts.json $options --steps 120 \
    --output "$scratch/whole" >"$scratch/out" 2>"$scratch/err" || fail "the run without Slurm: $(tail -n 3 "$scratch/err")"
same() {
    /usr/bin/python3 - "$1/run.h5" "$2/run.h5" "$3" <<'P'
import sys, h5py
one, two = (h5py.File(path, "r")["/train/loss"][...] for path in sys.argv[1:3])
assert len(one) == len(two) == int(sys.argv[3]), (len(one), len(two))
assert one[0] - one[-1] > 0.5, "nothing was learned: %g to %g" % (one[0], one[-1])
assert (one == two).all(), "losses differ first at step %d" % (one != two).argmax()
P
}
same "$RUN" "$scratch/whole" 120 || fail "the losses of the stopped job"

# 3. Submitted again after completion.
job=$(submit -- --steps 120)
ends_well "$job" 0
same "$RUN" "$scratch/whole" 120 || fail "the losses after a job that had nothing to do"

# 4. GPT-39B's script without arguments, from a folder of the user, with an installed hapt. The model and the cluster are smaller. What the
# script asks of Slurm is replaced, as on a site with other partitions. The time limit leaves more than the ten minutes before it in which
# the script asks for a signal.
mkdir "$scratch/site"
packaging/install.sh install "$scratch/prefix" "" "$HAPT_BUILD" >/dev/null || fail "hapt cannot be installed"
four_gpus
unlike=(--nodes=1 --ntasks-per-node=2 --cpus-per-task=1 --gres=none --time=30)
: >"$scratch/log"
job=$(cd "$scratch/site" && RUN='' PATH=$scratch/prefix/bin:$PATH CLUSTER=$scratch/gpus.json MODEL=gpt2-124m $slurm on sbatch --parsable \
    --partition=fast "${unlike[@]}" : --partition=slow "${unlike[@]}" "$scratch/prefix/share/hapt/jobs/gpt39b.slurm")
ends_well "$job" 0
site=$scratch/site/outputs/gpt39b
check "the rehearsal's run file" /usr/bin/python3 -c 'import h5py, sys; assert len(h5py.File(sys.argv[1])["/train/step_time"]) == 3' "$site/rehearsal/run.h5"
check "a plan" test -s "$site/plan.h5"
check "gpt39b says which data to give: $(tail -n 3 "$scratch/log")" grep -q 'gpt39b: to train, submit the same script with DATA' "$scratch/log"

# 5. The signal before the time limit, which Slurm may send up to a minute early. Then the same job with an srun that never ends by itself:
# the exit codes 9 and 0 come from the controller.
if [ -n "${HAPT_LONG:-}" ]; then
    RUN=$scratch/limited
    : >"$scratch/log"
    job=$(submit --time=2 --signal=USR1@30 -- --steps 100000)
    checks=$((checks + 2))
    wait_until 150 eval '[ "$(value "$job" Restarts)" = 1 ]' || fail "the time limit: no signal came in time"
    wait_until 60 grep -q 'resuming after step' "$scratch/log" || fail "the job does not go on after the time limit: $(tail -n 5 "$scratch/log")"
    $slurm on scancel "$job"
    wait_until 60 over "$job"

    RUN=$scratch/hanging
    mkdir "$scratch/bin"
    printf '#!/bin/sh\n%s "$@"\nexec sleep 1000\n' "$(command -v srun)" >"$scratch/bin/srun"
    chmod +x "$scratch/bin/srun"
    job=$(PATH=$scratch/bin:$PATH submit -- --steps 120)
    checks=$((checks + 1))
    wait_until 60 has_checkpoint || fail "no checkpoint: $(grep -m 3 "hapt: error" "$scratch/log"; tail -n 20 "$scratch/log")"
    $slurm on scancel --signal=USR1 "$job"
    ends_well "$job" 1
    same "$RUN" "$scratch/whole" 120 || fail "the losses of the job whose srun hangs"

    # README.md's four commands, in a copy of the repository. Devices and links are found.
    readme=$scratch/readme
    mkdir -p "$readme/build/release" "$readme/bin"
    git ls-files -z README.md inputs jobs | tar --null -T - -c | tar -x -C "$readme"
    cp -L "$HAPT" "$readme/build/release/hapt" && ln -s release/hapt "$readme/build/hapt"
    printf '#!/bin/sh\nexec %s on %s "$@"\n' "$slurm" "$(command -v sbatch)" >"$readme/bin/sbatch"
    chmod +x "$readme/bin/sbatch"
    awk '/^```slurm$/ {on = 1; next} /^```$/ {on = 0} on' README.md >"$readme/commands"
    check "README.md has four commands for Slurm" [ "$(wc -l <"$readme/commands")" -eq 4 ]
    : >"$scratch/log"
    (cd "$readme" && PATH=$readme/bin:$PATH timeout 400 env -u CLUSTER -u RUN bash -ex commands >"$scratch/out" 2>"$scratch/err") ||
        fail "README.md's commands for Slurm: $(tail -n 3 "$scratch/err") $(tail -n 5 "$scratch/log")"
    check "the run learns" /usr/bin/python3 -c '
import h5py, sys
loss = h5py.File(sys.argv[1])["/train/loss"][...]
assert len(loss) == 200 and loss[0] - loss[-1] > 1, (len(loss), loss[0], loss[-1])' "$readme/outputs/gpt/run.h5"
    for host in a0 b0; do check "the report names host $host" grep -q "host $host, " "$scratch/out"; done

    # docs/slurm.md: the models that its commands name, and the lab's sinfo. Its jobs end by themselves.
    rm -rf "$readme"/outputs/*
    for model in model inputs/gpt; do cp "$scratch/m.h5" "$readme/$model.h5"; done
    cp "$readme/bin/sbatch" "$readme/bin/sinfo" && sed -i "s|$(command -v sbatch)|$(command -v sinfo)|" "$readme/bin/sinfo"
    ln -s "$readme/build/hapt" "$readme/bin/hapt"
    awk '/^```slurm$/ {on = 1; next} /^```$/ {on = 0} on' docs/slurm.md >"$readme/commands"
    check "docs/slurm.md has commands for Slurm" [ "$(wc -l <"$readme/commands")" -eq 5 ]
    (cd "$readme" && PATH=$readme/bin:$PATH timeout 400 env -u CLUSTER -u RUN bash -ex commands >"$scratch/out" 2>"$scratch/err") ||
        fail "docs/slurm.md's commands: $(tail -n 3 "$scratch/err")"
    check "docs/slurm.md: a cluster file and an explained plan" test -s "$readme/lab.json" -a "$(grep -c '^plan: ' "$scratch/out")" -eq 1
    idle() { local jobs; jobs=$($slurm on squeue --noheader) && [ -z "$jobs" ]; }
    checks=$((checks + 1))
    wait_until 300 idle || fail "the jobs of docs/slurm.md do not end: $($slurm on squeue)"
    for run in gpt:100 model:1000; do
        check "docs/slurm.md: $run steps: $(tail -n 3 "$scratch/log")" /usr/bin/python3 -c '
import h5py, sys
assert len(h5py.File(sys.argv[1])["/train/loss"]) == int(sys.argv[2])' "$readme/outputs/${run%:*}/run.h5" "${run#*:}"
    done
fi
finish
