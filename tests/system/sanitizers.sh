#!/usr/bin/env bash
# Three ranks train under a sanitizer: a run that is stopped, one that is killed, and one that resumes and ends. No report may have a frame
# of hapt.
# SANITIZERS: the variants (tsan lsan asan), which are built if missing. Part of the long checks; `make tsan`, `make lsan`.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1
[ -n "${HAPT_LONG:-}" ] || { echo "HAPT_LONG=1 trains under the sanitizers"; exit 77; }

# OpenMP's threads wait by futexes, which ThreadSanitizer does not know. So there is one thread.
export OMP_NUM_THREADS=1
rules=$PWD/tests/sanitizers
gcc -shared -fPIC -o "$scratch/keep_open.so" "$rules/keep_open.c" || exit 1
# ThreadSanitizer of older compilers supports at most 28 random bits in addresses.
fixed=
[ "$(cat /proc/sys/vm/mmap_rnd_bits 2>/dev/null || echo 0)" -le 28 ] || fixed="setarch $(uname -m) -R"

# Reports go to $logs.PID; the exit code stays the program's.
under() { # VARIANT
    logs=$scratch/report-$1
    local all="log_path=$logs exitcode=0"
    export TSAN_OPTIONS="$all suppressions=$rules/tsan.supp history_size=7 second_deadlock_stack=1"
    # Slow but complete stacks, because the libraries have no frame pointers.
    export LSAN_OPTIONS="suppressions=$rules/lsan.supp print_suppressions=0"
    [ "$1" != lsan ] || LSAN_OPTIONS="$LSAN_OPTIONS $all fast_unwind_on_malloc=0"
    export ASAN_OPTIONS="$all detect_leaks=1 fast_unwind_on_malloc=0 verify_asan_link_order=0"
    export UBSAN_OPTIONS="print_stacktrace=1 log_path=$logs"
    preload=
    [ "$1" = tsan ] || preload="-x LD_PRELOAD=$scratch/keep_open.so"
}
# start ARGUMENTS...: three ranks in the background; $launcher
start() {
    # shellcheck disable=SC2086
    mpirun --oversubscribe --bind-to none -np 3 $preload $fixed "$program" train --input "$scratch/m.h5" --cluster "$scratch/c.json" --plan "$scratch/plan.h5" \
        --threads 1 --checkpoint-every 6 --replica-check 4 --timeout "60 s" --output "$scratch/run-$variant" "$@" >"$scratch/$variant.log" 2>&1 &
    launcher=$!
}
newest() { ls "$scratch/run-$variant/checkpoints" 2>/dev/null | sed -n 's/^step-0*//p' | sort -n | tail -n 1; }
# Waits until there is a newer checkpoint than step $1.
await() {
    for _ in $(seq 1200); do
        [ "$(newest)" -gt "$1" ] 2>/dev/null && return
        kill -0 $launcher 2>/dev/null || break
        sleep 0.1
    done
    fail "$variant: no checkpoint after step $1: $(tail -n 3 "$scratch/$variant.log")"
    return 1
}
ends() { # CODE WHAT
    wait $launcher
    local code=$?
    check "$variant: $2 ends with code $1" [ $code -eq "$1" ]
    [ $code -eq "$1" ] || tail -n 5 "$scratch/$variant.log" >&2
}
# Splits the reports of a run. A report with a frame of hapt (a source file or the executable) is a failure. But ThreadSanitizer drops the
# older stack of some reports; then OpenMPI may have made that access.
look() { # WHAT
    local report found=$scratch/found
    mkdir -p "$found"
    cat "$logs".* 2>/dev/null | awk -v to="$found/" '/^=+$/ { n++ } { print >(to n + 0) }'
    for report in "$found"/*; do
        grep -qE 'Sanitizer|runtime error' "$report" 2>/dev/null || continue
        if ! grep -qE '^ +#[0-9]+ .*( src/|[(/]hapt\+0x)' "$report"; then
            elsewhere=$((elsewhere + 1))
        elif grep -q 'failed to restore the stack' "$report"; then
            half=$((half + 1))
        else
            fail "$variant, $1:"
            head -n 80 "$report" >&2
        fi
    done
    rm -rf "$logs".* "$found"
    checks=$((checks + 1))
}

"$HAPT" data LICENSE --output "$scratch/t.h5" >/dev/null || exit 1
small_plan --data "$scratch/t.h5"
elsewhere=0 half=0
for variant in ${SANITIZERS:-tsan lsan asan}; do
    program=$PWD/build/$variant/hapt
    make VARIANT=$variant CUDA=0 "build/$variant/hapt" >"$scratch/make.log" 2>&1 || { fail "make VARIANT=$variant: $(tail -n 3 "$scratch/make.log")"; continue; }
    under $variant
    start --steps 100000
    await 6 && kill -USR1 $launcher
    ends 9 "a run that is stopped"
    look "a run that is stopped"
    step=$(newest)
    start --steps 100000 --resume yes
    await "$step" && kill -KILL "$(pgrep -P $launcher -x hapt | tail -n 1)"
    wait $launcher
    check "$variant: a run that loses a rank fails" [ $? -ne 0 ]
    look "a run that loses a rank"
    step=$(newest)
    start --steps $((step + 20)) --resume yes
    ends 0 "a run that resumes"
    look "a run that resumes"
    check "$variant: it came to its end" [ "$(newest)" -eq $((step + 20)) ]
done
figures="$elsewhere reports without a frame of hapt, $half without one of their stacks"
finish
