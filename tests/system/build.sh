#!/usr/bin/env bash
# Properties of the build and of processes: hardening in the ELF files, names in process lists, and no installation without a request.
# Runs beside others: it measures no time.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1

# Sanitizers replace the hardening, and a build may be without it.
hardened() { # FILE
    readelf -Wld "$1" >"$scratch/elf" && grep -q GNU_RELRO "$scratch/elf" && grep -qE 'BIND_NOW|Flags:.* NOW' "$scratch/elf" &&
        readelf -Ws --dyn-syms "$1" | grep -q __stack_chk_fail
}
is_pie() { readelf -h "$1" | grep -q 'Type:.*DYN' && readelf -Wd "$1" | grep -q 'Flags:.* PIE'; }
fortified() { readelf -Ws --dyn-syms "$1" | grep -qE '__[a-z]+_chk@'; }
if nm "$HAPT" 2>/dev/null | grep -qE '__(asan|tsan|lsan)_init' || [ "${HARDEN:-}" = 0 ]; then
    note "a build without hardening: not looked at"
else
    check "the executable has RELRO, BIND_NOW and stack protection" hardened "$HAPT"
    check "the executable is position independent" is_pie "$HAPT"
    check "the executable calls the checked functions" fortified "$HAPT"
    for library in hapt-cuda.so tests/gpu/hapt-cuda-host.so tests/faults/faults.so; do
        [ ! -e "$HAPT_BUILD/$library" ] || check "$library has RELRO, BIND_NOW and stack protection" hardened "$HAPT_BUILD/$library"
    done
    # The check can fail: the same link line without the flags.
    echo 'int main(void) { return 0; }' | gcc -xc -O2 -no-pie -Wl,-z,norelro,-z,lazy -o "$scratch/plain" - &&
        check "a plain executable has no hardening" eval '! hardened "$scratch/plain" && ! is_pie "$scratch/plain" && ! fortified "$scratch/plain"'
fi

# Names of a rank, its sandbox process and its threads. Two stages on three ranks: each rank has a communication thread.
"$HAPT" data LICENSE --output "$scratch/t.h5" >/dev/null || exit 1
small_plan --data "$scratch/t.h5"
mpirun --oversubscribe --bind-to none -np 3 "$HAPT" train --input "$scratch/m.h5" --cluster "$scratch/c.json" --plan "$scratch/plan.h5" --steps 100000000 \
    --checkpoint-every 1000 --output "$scratch/run" >"$scratch/run.log" 2>&1 &
launcher=$!
names() {
    local rank
    for rank in $(pgrep -P $launcher); do cat "/proc/$rank/comm" /proc/"$rank"/task/*/comm; for helper in $(pgrep -P "$rank"); do cat "/proc/$helper/comm"; done; done
}
for _ in $(seq 200); do
    names >"$scratch/names" 2>/dev/null
    [ "$(grep -c '^hapt-comm$' "$scratch/names")" -eq 3 ] && [ "$(grep -c '^hapt-save$' "$scratch/names")" -eq 2 ] && break
    sleep 0.1
done
for rank in $(pgrep -P $launcher); do check "a rank is called hapt" [ "$(cat "/proc/$rank/comm")" = hapt ]; done
check "three ranks are there" [ "$(pgrep -P $launcher | wc -l)" -eq 3 ]
for name in "3 hapt-comm" "3 hapt-heartbeat" "2 hapt-save" "3 hapt-sandbox"; do # the first rank of a stage writes
    check "names: $name" [ "$(grep -cx "${name#* }" "$scratch/names")" -eq "${name% *}" ]
done
kill -TERM $launcher
wait $launcher 2>/dev/null

# jobs/setup-debian.sh on a machine that lacks something: `deps USER-ID PROGRAM... -- ARGUMENTS...` runs it with these programs only.
# Programs that would install something are replaced; they write to $scratch/calls.
deps() {
    local id=$1 program
    rm -rf "$scratch/bin" "$scratch/calls" && mkdir "$scratch/bin"
    shift
    while [ "$1" != -- ]; do
        program=$(command -v "$1") && ln -s "$program" "$scratch/bin/$1"
        shift
    done
    shift
    for program in sudo apt-get doas su; do
        printf '#!/bin/bash\necho "%s $*" >>"%s"\n%s\n' $program "$scratch/calls" "$([ $program = sudo ] && echo 'exec "$@"')" >"$scratch/bin/$program"
    done
    printf '#!/bin/bash\necho %s\n' "$id" >"$scratch/bin/id"
    for program in bash env cat; do ln -sf "$(command -v $program)" "$scratch/bin/$program"; done
    chmod +x "$scratch"/bin/{sudo,apt-get,doas,su,id}
    env -i HOME="$scratch" PATH="$scratch/bin" "$@" >"$scratch/out" 2>"$scratch/err"
}
most="gcc make pkg-config mpicc mpirun h5dump"
run() { # ID PROGRAMS ASSIGNMENT...
    local id=$1 programs=$2
    shift 2
    # shellcheck disable=SC2086
    deps "$id" $programs -- "$@" bash "$PWD/jobs/setup-debian.sh"
}
run 1000 "$most"; code=$? # bible is missing, which is optional
check "nothing is installed without a request" [ ! -e "$scratch/calls" ]
check "a missing optional package is no error" [ $code -eq 0 ]
check "the command is printed" grep -qx 'sudo apt-get update && sudo apt-get install -y --no-install-recommends .*bible-kjv.*' "$scratch/err"
run 1000 "${most/mpicc/}"; code=$?
check "nothing is installed without a request if an essential package is missing" [ ! -e "$scratch/calls" ]
check "a missing essential package is an error" [ $code -eq 3 ]
check "and is named" grep -q 'error: hapt cannot be built without: .*libopenmpi-dev' "$scratch/err"
check "with a hint" [ "$(grep -c '^hint: ' "$scratch/err")" -eq 1 ]
run 1000 "$most" SUDO=sudo
check "SUDO=sudo installs" grep -q 'apt-get .*install .*bible-kjv' "$scratch/calls"
check "by sudo" grep -q '^sudo env .*apt-get' "$scratch/calls"
run 0 "$most"
check "root installs" grep -q '^apt-get .*install .*bible-kjv' "$scratch/calls"
check "without sudo" [ "$(grep -c sudo "$scratch/calls")" -eq 0 ]
check "nothing else calls sudo" [ -z "$(grep -lE '(^|[;&|(]|\$\(Q\))[[:space:]]*sudo ' Makefile jobs/*.sh jobs/*.slurm tests/run bench/run 2>/dev/null | grep -v setup-debian)" ]
finish
