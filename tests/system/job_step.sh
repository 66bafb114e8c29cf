#!/usr/bin/env bash
# jobs/heterogeneous-step.sh.inc where srun stays although its step is over: the job ends with the code of rank 0. srun, squeue, scontrol and
# hapt are stand-ins; jobs/two-subclusters.slurm is the true script.
# Runs beside others: it measures no time.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1
bin=$scratch/bin
mkdir "$bin" "$scratch/build"
ln -s "$PWD/jobs" "$scratch/jobs"
# squeue shows the step for the first STEPS queries. With AWAY every second query gets no answer.
cat >"$bin/squeue" <<'SH'
#!/bin/bash
echo >>"$CASE/asked"
asked=$(wc -l <"$CASE/asked")
if [ -n "$AWAY" ] && [ $((asked % 2)) -eq 0 ]; then echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1; fi
printf '7+0.batch\n7+0.extern\n'
[ $asked -gt $STEPS ] || printf '7+0.0\n7+1.0\n'
SH
# Runs four ranks. LEAVES: it ends with that code, else never.
cat >"$bin/srun" <<'SH'
#!/bin/bash
while [[ $1 = --* ]]; do shift; done
[ -n "$LOST" ] || PMIX_RANK=0 "$@" &
for rank in 1 2 3; do PMIX_RANK=$rank "$@" & done
wait
[ -z "$LEAVES" ] || exit $LEAVES
exec /bin/sleep 100
SH
# The program. While it runs, the step is signalled as by Slurm: every process.
cat >"$scratch/build/hapt" <<'SH'
#!/bin/bash
asked=no
trap 'asked=yes' USR1
if [ -n "$SIGNAL" ]; then kill -USR1 $$; [ "$PMIX_RANK" != 0 ] || kill -USR1 $PPID; fi
/bin/sleep 0.2
[ -z "$SIGNAL" ] || [ $asked = yes ] || exit 99
[ $CODE -lt 128 ] || kill -$((CODE - 128)) $$
exit $CODE
SH
cat >"$bin/scontrol" <<'SH'
#!/bin/bash
echo "$@" >>"$CASE/scontrol"
SH
printf '#!/bin/sh\nexec /bin/sleep 0.1\n' >"$bin/sleep"
chmod +x "$bin"/* "$scratch/build/hapt"

begin() { # NAME VARIABLES...
    local name=$1
    shift
    mkdir "$scratch/$name"
    (
        cd "$scratch" || exit
        env PATH="$bin:$PATH" TMPDIR="$scratch/$name" SLURM_JOB_ID=7 CASE="$scratch/$name" POLL_S=1 STEPS=8 AWAY= LEAVES= LOST= SIGNAL= CODE=0 "$@" \
            timeout 60 bash jobs/two-subclusters.slurm m.h5 >"$scratch/$name/out" 2>&1
        echo $? >"$scratch/$name/code"
    ) &
}
expect() { # NAME CODE REQUEUES
    checks=$((checks + 3))
    [ "$(cat "$scratch/$1/code")" = "$2" ] || fail "$1: code $(cat "$scratch/$1/code"), not $2: $(cat "$scratch/$1/out")"
    [ "$(cat "$scratch/$1/scontrol" 2>/dev/null)" = "${3:-}" ] || fail "$1: scontrol $(cat "$scratch/$1/scontrol" 2>&1)"
    ! compgen -G "$scratch/$1/tmp.*" >/dev/null || fail "$1 leaves $(ls "$scratch/$1")"
}
begin hangs-done
begin hangs-stopped CODE=9 SIGNAL=yes
begin hangs-failed CODE=3
begin hangs-killed CODE=137
begin hangs-quick CODE=2 STEPS=0            # over before the first query
begin hangs-away CODE=9 AWAY=yes STEPS=15   # the controller does not answer now and then: the step is not ended for that
begin hangs-lost LOST=yes                   # the node of rank 0 failed
begin leaves-done LEAVES=0 STEPS=1000
begin leaves-stopped CODE=9 LEAVES=9 STEPS=1000
begin leaves-failed CODE=3 LEAVES=3 STEPS=1000
begin aborts-done LEAVES=134 STEPS=1000     # srun's own abort after its ranks have ended
begin aborts-failed CODE=3 LEAVES=134 STEPS=1000
begin aborts-lost LEAVES=134 LOST=yes STEPS=1000
begin leaves-killed LEAVES=137 STEPS=1000   # srun's own code for a killed rank
wait
expect hangs-done 0
expect hangs-stopped 0 "requeue 7"
expect hangs-failed 3
expect hangs-killed 137
expect hangs-quick 2
expect hangs-away 0 "requeue 7"
expect hangs-lost 8
expect leaves-done 0
expect leaves-stopped 0 "requeue 7"
expect leaves-failed 3
expect aborts-done 0
expect aborts-failed 3
expect aborts-lost 134
expect leaves-killed 137
checks=$((checks + 1))
[ "$(wc -l <"$scratch/hangs-away/asked")" -gt 15 ] || fail "a step was ended while the controller was away"
finish
