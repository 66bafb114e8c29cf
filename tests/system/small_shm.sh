#!/usr/bin/env bash
# Containers with a small /dev/shm (one page, 64 kB, 64 MB), also without space in /tmp. The job, profile, plan and train run on 1 to 4
# ranks, with tokens larger than that, or end with one clear error within the timeout. Uses its own mount namespaces: needs root. mpirun 4.1
# itself hangs without some megabytes in /tmp. So /tmp keeps 16 MB, which is too little for segments of MPI.
# HAPT_LONG=1: every size, command and number of ranks; else some.
# Runs beside others
. tests/system/lib.sh.inc
unset OMPI_MCA_btl # hapt chooses the transports
[ "$(id -u)" -eq 0 ] && unshare -m sh -c 'mount -t tmpfs -o size=64k none /dev/shm' 2>/dev/null || { echo "private mounts need root"; exit 77; }
most=100 # seconds: --timeout 20 s on a busy machine
# 40 MB as 80 MB of tokens: more than 64 MB
if [ -n "${HAPT_LONG:-}" ]; then bytes=40000000; else bytes=2000000; fi
head -c $bytes /dev/urandom >"$scratch/noise"
passes 1 data "$scratch/noise" --type bytes --output "$scratch/t.h5" || finish
passes 1 model gpt --layers 2 --hidden 16 --heads 2 --sequence 8 --vocab 256 --microbatch 4 --output "$scratch/m.h5" || finish
for ranks in 1 2 3 4; do
    cat >"$scratch/c$ranks.json" <<JSON
{ "format": "hapt-cluster", "version": 1, "subclusters": [
    {"name": "a", "nodes": 1, "devices_per_node": $ranks, "device": "cpu", "memory": "900 MB"} ] }
JSON
    passes 1 profile --input "$scratch/m.h5" --cluster "$scratch/c$ranks.json" --predict --output "$scratch/p.h5" || finish
    count_layers
    # data-parallel: collectives in shared memory; two stages: messages
    [ $ranks -eq 3 ] && submesh=1x1 || submesh=1x$ranks
    passes 1 plan --profile "$scratch/p.h5" --microbatches 2 --stages "0-$layers@a:$submesh" --output "$scratch/plan$ranks.h5" || finish
done

cp "$HAPT" "$scratch/hapt"
# small SIZE_OF_SHM SIZE_OF_TMP RANKS ARGUMENTS...: in a namespace with these sizes; "-": unchanged
small() {
    local shm=$1 tmp=$2 ranks=$3
    shift 3
    local launcher=() program=$HAPT
    [ "$tmp" = - ] || program=$here/hapt # the namespace would hide a build in /tmp
    [ "$ranks" -eq 1 ] || launcher=(mpirun --oversubscribe --bind-to none -np "$ranks")
    # scratch may be in /tmp: then only TMPDIR points to the namespace's, else /tmp and /var/tmp are covered
    # shellcheck disable=SC2016
    timeout -k 5 $most unshare -m --kill-child -fp --mount-proc sh -c '
        mount -t tmpfs -o size="$0" none /dev/shm || exit 100
        if [ "$1" != - ]; then
            mkdir -p "$2" && mount --bind "$3" "$2" && mount -t tmpfs -o size="$1" none /tmp && mount -t tmpfs -o size="$1" none /var/tmp || exit 100
            unset TMPDIR
        fi
        shift 3; exec "$@"' "$shm" "$tmp" "$here" "$scratch" "${launcher[@]}" "$program" "$@" >"$scratch/out" 2>"$scratch/err"
}
here=$(mktemp -d -p /run 2>/dev/null || mktemp -d -p /root)
[ -d "$here" ] || { echo "no folder beside /tmp"; exit 77; }
trap 'rm -rf "$scratch"; rmdir "$here"' EXIT
ran=0 told=0
# survives SHM TMP RANKS NAME
survives() {
    local shm=$1 tmp=$2 ranks=$3 name=$4 top=$scratch arguments code
    [ "$tmp" = - ] || top=$here
    rm -rf "$scratch/run"
    case $name in
        job) arguments="--input $top/m.h5 --data $top/t.h5 --steps 3 --profile-seconds 0.2 --microbatches 2 --output $top/run" ;;
        train) arguments="train --input $top/m.h5 --plan $top/plan$ranks.h5 --data $top/t.h5 --steps 3 --output $top/run" ;;
        profile) arguments="profile --input $top/m.h5 --profile-seconds 0.2 --output $top/run" ;;
        plan) arguments="plan --input $top/m.h5 --profile-seconds 0.2 --microbatches 2 --output $top/run" ;;
    esac
    checks=$((checks + 1))
    # shellcheck disable=SC2086
    small "$shm" "$tmp" "$ranks" $arguments --cluster "$top/c$ranks.json" --threads 1 --timeout "20 s"
    code=$?
    case $code in
        0) ran=$((ran + 1)); [ -e "$scratch/run" ] || fail "/dev/shm of $shm, /tmp of $tmp, $name on $ranks ranks: nothing was written" ;;
        2 | 3 | 5 | 6 | 7)
            told=$((told + 1))
            [ "$(grep -c '^hapt: error:' "$scratch/err")" -eq 1 ] && grep -q '^hint: ' "$scratch/err" ||
                fail "/dev/shm of $shm, /tmp of $tmp, $name on $ranks ranks: code $code: $(tail -n 20 "$scratch/err")"
            # with space in /tmp it must run
            [ "$tmp" != - ] || fail "/dev/shm of $shm, $name on $ranks ranks: code $code: $(tail -n 5 "$scratch/err")" ;;
        *) fail "/dev/shm of $shm, /tmp of $tmp, $name on $ranks ranks: code $code: $(tail -n 20 "$scratch/err")" ;;
    esac
}
if [ -n "${HAPT_LONG:-}" ]; then
    for shm in 4096 64k 64m; do
        for name in job train profile plan; do
            for ranks in 1 2 3 4; do
                survives $shm - $ranks $name
                survives $shm 16m $ranks $name
            done
        done
    done
else
    survives 4096 - 1 job
    survives 4096 - 4 train
    survives 64k - 3 profile
    survives 64k 16m 2 train
    survives 4096 16m 2 job
    survives 64m 16m 2 plan
fi
figures="$ran ran, $told ended with an error"
finish
