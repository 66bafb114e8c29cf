#!/usr/bin/env bash
# tests/gpu/run with stand-in programs: the order of the parts as on a GPU, limits, continuing after a failure, the results file.
# Runs beside others: it measures no time.
. tests/system/lib.sh.inc
tree=$scratch/tree
mkdir -p "$tree"/build/release/tests/{unit,gpu} "$scratch"/{cuda,path}/bin "$tree/tests/gpu"
cp tests/gpu/run "$tree/tests/gpu/"
program() { # FILE: a script of the standard input
    { echo '#!/usr/bin/env bash'; cat; } >"$1"
    chmod +x "$1"
}
program "$tree/build/release/hapt" <<<'echo "  cuda               ${DEVICES:-1 device, CUDA 13.0}"; echo "  ${LIBRARY:-libnccl.so.2       /x/libnccl.so.2}"'
program "$tree/build/release/tests/unit/kernels_attention" <<<'echo "7 checks, 0 failed"'
program "$tree/build/release/tests/unit/kernels_layers" <<<'echo "a \"quoted\" \\ line	of text"; echo "9 checks, 2 failed"; exit 1'
program "$tree/build/release/tests/unit/kernels_moe" <<<'echo "no device"; exit 77'
# Neither it nor its child in another process group ends on request.
program "$tree/build/release/tests/unit/kernels_replay" <<END_OF_PROGRAM
trap '' TERM
set -m
(trap '' TERM; echo \$BASHPID >"$scratch/left"; exec sleep 1000) &
echo begun
wait
sleep 1000
END_OF_PROGRAM
program "$tree/build/release/tests/gpu/group" <<<'echo "NCCL 2.28.9"'
program "$scratch/cuda/bin/compute-sanitizer" <<<'echo "$* $HAPT_TEST_SHAPES" >>'"$scratch/checked"'; shift 4; exec "$@"'
# The first Python lacks no module; a second one lacks PyTorch.
program "$scratch/python" <<<'[ "$1" != - ] || { [[ " $* " == *" torch "* ]] && echo torch; exit 0; }; echo "$HAPT_FIGURES" >>'"$scratch/asked"'; echo "speed 12.5" >>"$HAPT_FIGURES"; echo "ran $*"'
program "$scratch/path/bin/python3" <<<'[ "$1" != - ] || { [[ " $* " == *" torch "* ]] && echo torch 2; exit 0; }; echo "the other Python"'
results=$scratch/results
parts() { # ENVIRONMENT...: runs all
    : >"$results"
    env -u HAPT_CUDA_PLUGIN PATH="$scratch/path/bin:/usr/bin:/bin" HAPT_PYTHON="$scratch/python" CUDA_HOME="$scratch/cuda" HAPT_GPU_RESULTS="$results" \
        HAPT_GPU_PART_SECONDS=1 "$@" "$tree/tests/gpu/run" build/release >"$scratch/said" 2>&1
    code=$?
}
of() { # PART KEY
    python3 - "$results" "$1" "$2" <<'PYTHON'
import json, sys
found = [row for row in map(json.loads, open(sys.argv[1])) if row["part"] == sys.argv[2]]
print(found[-1][sys.argv[3]] if found else "nothing")
PYTHON
}
is() { check "$1: $2" test "$(of "$1" "$2")" = "$3"; } # PART KEY VALUE

parts
check "failures: code $code: $(cat "$scratch/said")" test $code -eq 1
is kernels_attention status passed
is kernels_attention figures "{'checks': 7, 'failures': 0}"
is kernels_layers status failed
is kernels_layers reason "exit code 1"
is kernels_layers output "['a \"quoted\" \\\\ line of text', '9 checks, 2 failed']"
is kernels_moe status failed # a device exists, so it has no reason to skip
is kernels_replay status timeout
is kernels_replay reason "it did not end within 1 s"
is kernels_replay output "['begun']"
gone() { # PID: ended, or a zombie that nobody collects
    for _ in $(seq 50); do
        grep -qs '^State:[[:space:]]*[^ZX]' "/proc/$1/status" || return 0
        sleep 0.1
    done
    return 1
}
check "a part that was ended leaves no process" test -s "$scratch/left"
check "a part that was ended leaves no process" gone "$(cat "$scratch/left")"
is "benchmark hapt" figures "{'speed': 12.5}"
is "benchmark PyTorch compiled" status skipped
check "it names what is missing" grep -q "needs Python with torch: .*/python lacks torch; .*/path/bin/python3 lacks torch 2" <(of "benchmark PyTorch compiled" reason)
is "racecheck kernels_attention" status passed
check "checkers take few shapes" grep -q -- "--tool racecheck --error-exitcode 1 .*kernels_attention 1x129x1x64," "$scratch/checked"
is "a hundred steps" output "['ran tests/gpu/train.py hundred']"
check "the end" grep -q '"part": "end", "passed": [0-9]*, "failed": [0-9]*, "skipped": [0-9]*, "seconds"' "$results"
order="doctor kernels_attention benchmark.hapt benchmark.hapt.again benchmark.operators operators.attention operators.linear operators.loss
a.hundred.steps racecheck.kernels_attention synccheck.kernels_layers memcheck.kernels_layers groups.of.one.rank training.gpt training.bert
uneven.split collectives profiles memcheck.kernels_replay end"
check "the parts in order of information" grep -q "^start $(tr '\n' ' ' <<<"$order" | sed 's/ *$//; s/ / .*/g')$" \
    <(sed 's/{"part": "\([^"]*\)".*/\1/; s/ /./g' "$results" | tr '\n' ' ' | sed 's/ $//; s/$/\n/')

# All parts together have a limit as well. The remaining parts are reported as omitted.
parts HAPT_GPU_SECONDS=4
is "uneven split" reason "the 4 s of all parts are over"

# A library that is missing beside a device is a failure, and so is one that hides the device. No GPU at all is none.
parts LIBRARY="libnccl.so.2       missing: it is nowhere" HAPT_GPU_SECONDS=8
is doctor status failed
parts DEVICES="0 devices: libcublasLt.so.13 is nowhere" LIBRARY="libcublasLt.so.13  missing: it is nowhere"
is doctor status failed
check "no library: code $code" test $code -eq 1
if [ ! -e /dev/nvidiactl ] && [ ! -e /dev/dxg ]; then
    parts DEVICES="0 devices: no NVIDIA driver on this machine"
    is doctor status skipped
    check "no GPU: code $code" test $code -eq 77
fi
finish
