#!/usr/bin/env bash
# jobs/heterogeneous-step.sh.inc where srun stays although its step is over: the job ends as the controller says that the step did. srun,
# squeue and scontrol are stand-ins; jobs/two-subclusters.slurm is the true script.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1
bin=$scratch/bin
mkdir "$bin"
# The step is there for the first questions (STEPS of them), then no more; with AWAY the controller is away at every second one.
cat >"$bin/squeue" <<'SH'
#!/bin/bash
echo >>"$CASE/asked"
asked=$(wc -l <"$CASE/asked")
if [ -n "$AWAY" ] && [ $((asked % 2)) -eq 0 ]; then echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1; fi
printf '7+0.batch\n7+0.extern\n'
[ $asked -gt $STEPS ] || printf '7+0.0\n7+1.0\n'
SH
# LEAVES: it ends with that code after a second, else never.
cat >"$bin/srun" <<'SH'
#!/bin/bash
[ -z "$LEAVES" ] || { /bin/sleep 1; exit $LEAVES; }
exec /bin/sleep 100
SH
cat >"$bin/scontrol" <<'SH'
#!/bin/bash
echo "$@" >>"$CASE/scontrol"
[ "$1" != requeue ] || exit 0
for code in $CODES; do printf 'JobId=7 JobName=hapt-two\n   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0\n   DerivedExitCode=%s\n   RunTime=00:00:09\n' $code; done
SH
printf '#!/bin/sh\nexec /bin/sleep 0.05\n' >"$bin/sleep"
chmod +x "$bin"/*

cases=()
begin() { # NAME VARIABLES...
    local name=$1
    shift
    mkdir "$scratch/$name"
    cases+=("$name")
    (
        env PATH="$bin:$PATH" SLURM_JOB_ID=7 CASE="$scratch/$name" STEPS=3 AWAY= LEAVES= CODES= "$@" \
            timeout 60 bash jobs/two-subclusters.slurm "$scratch/m.h5" >"$scratch/$name/out" 2>&1
        echo $? >"$scratch/$name/code"
    ) &
}
expect() { # NAME CODE REQUEUES
    checks=$((checks + 2))
    [ "$(cat "$scratch/$1/code")" = "$2" ] || fail "$1: code $(cat "$scratch/$1/code"), not $2: $(cat "$scratch/$1/out")"
    [ "$(grep -c '^requeue 7' "$scratch/$1/scontrol" 2>/dev/null)" = "${3:-}" ] || fail "$1: $(cat "$scratch/$1/scontrol" 2>&1)"
}
begin hangs-stopped CODES="9:0 9:0"
begin hangs-failed CODES="3:0 3:0"
begin hangs-done CODES="0:0 0:0"
begin hangs-killed CODES="0:9 0:9"        # all ranks died of a signal
begin hangs-second CODES="0:0 7:0"        # only the second component knows
begin hangs-unknown CODES=""              # the controller has forgotten the job
begin hangs-away CODES="9:0 9:0" AWAY=yes STEPS=9 # the controller is away now and then: no step is ended for that
begin leaves-stopped LEAVES=9 STEPS=1000
begin leaves-failed LEAVES=3 STEPS=1000
begin leaves-killed LEAVES=137 STEPS=1000 # srun's own word for a rank that was killed
wait
expect hangs-stopped 0 1
expect hangs-failed 3 0
expect hangs-done 0 0
expect hangs-killed 137 0
expect hangs-second 7 0
expect hangs-unknown 8 0
expect hangs-away 0 1
checks=$((checks + 1))
[ "$(wc -l <"$scratch/hangs-away/asked")" -ge 10 ] || fail "a step was ended while the controller was away"
expect leaves-stopped 0 1
expect leaves-failed 3
expect leaves-killed 137
finish
