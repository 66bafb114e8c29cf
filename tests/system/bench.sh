#!/usr/bin/env bash
# Every section of the benchmarks in its smallest form (HAPT_BENCH_SMOKE=1): it ends well, and the lines with its figures are there, with
# numbers that are finite. HAPT_LONG=1: the longer ones, too, and `lab` and `schedules` where the machine allows a lab.
# Runs beside others: it measures no time.
. tests/system/lib.sh.inc
own_tree
limit=240
[ "${HAPT_LONG:-0}" = 0 ] || limit=1500 # s; long campaigns run beside this
# section LINES PATTERN PROGRAM SECTION...: LINES lines of its output match the pattern, in which @ is a number
section() {
    local lines=$1 pattern=${2//@/-?[0-9]+(\\.[0-9]+)?} name="bench/$3 ${*:4}" code
    HAPT_BENCH_SMOKE=1 timeout "$limit" "$tree/bench/$3" "${@:4}" >"$scratch/out" 2>"$scratch/err"
    code=$?
    check "$name ends with code $code: $(tail -n 5 "$scratch/out" "$scratch/err")" test $code -eq 0
    check "$name: not $lines lines with /$pattern/ in: $(cat "$scratch/out")" test "$(grep -cE "$pattern" "$scratch/out")" -eq "$lines"
}
if /usr/bin/python3 -c 'import torch' 2>/dev/null; then
    section 2 '^(fp32|bf16): ratio to PyTorch median @ .*; @ GFLOP/s, @ % of ' run reference
else
    note "no PyTorch: bench/run reference is left out"
fi
section 1 '^two ranks / two threads: median @ ' run ranks
section 1 "^hapt / even split: median @ .*; simulator's ratio @\$" run plan
section 1 '; 1 rank / 2 ranks: median @ ' run search
section 2 '^bert-base, .*: @ s, published @ s; @ operators, ' run synthesis
section 1 '^VGG19: at most @x over DP-EV ' hap figure-13
section 2 '^  2 A100 .*computation / communication +@; EV +@ s, CP +@ s, LP +@ s ' hap figure-2
section 2 '^[12] threads: update @ GB/s, memory @ GB/s: median ratio @, least @$' run optimizer
section 6 '^  autohete +@ +@/@/@( +@){4}$' run autohete
if [ "${HAPT_LONG:-0}" != 0 ]; then # half a minute, and 12 to 3 s each
    section 4 '^[24] : 1: (even split|best split by hand) / hapt: median @ ' run finetune
    if [ -n "${HAPT_TRANSFORMERS:-}" ]; then
        section 2 '^(fp32|bf16): transformers / hapt: median @ ' run published
        if "$HAPT_TRANSFORMERS" -c 'import diffusers' 2>/dev/null; then
            section 2 '^ *2 +2 +@ +@ +2 \| +3.72 +3.78$|^A100 alone, 16 items: hapt +@, even +@ items/s; hapt / even @$' sdxl
        fi
    fi
    section 1 '^each at its best rows: hapt first on [01] of 1; least @, quartiles @ @ @, most @$' compare table
    section 1 '^gpt2-124m: a plan at 2 of 2 sizes; worst cliff @; the best single choice takes @ to @ times as long$' memory
    section 4 '^on the (device|host), (in-order|priority): measured / predicted: median @' run priority
    section 2 '^3 : 1: even split.* / hapt: median @ ' run unet
    section 2 '^3 : 1: even split.* / hapt: median @ ' run diffusion
    section 1 '^1 of 1 stages with weights on the host: measured / predicted: median @' run weights
    section 2 '^step time, (even|proportional) data parallelism / HAP: median @ ' run hetero
    check "bench/run hetero: predictions" grep -qE '^predicted against measured over 5 plans: Pearson -?[0-9.]+,' "$scratch/out"
    section 1 '^VGG19: at most @x over DP-EV ' hap profiled
    section 2 '^run with checkpoints .* / with none: median @ ' run checkpoint
    section 1 '^@ Gbit/s: uneven experts up to @ % faster .* @ times the mean one, padded @$' hap figure-17
    section 1 '^step, busy and idle times of the stages: at most @ % of a step ' run emulated
    section 1 '^ +@( +@ s){4}  @, @ %, @ %, @ +@ s' compare bandwidth
    section 1 '^     @ rows: 8: @, 16: @, 48: @$' compare granularity
    section 1 '^    \(a\) .*, @ of +@: x@, .* balance @ % against @ %$' compare communication
fi
if [ "${HAPT_LONG:-0}" != 0 ] && tests/lab/lab.sh missing >/dev/null; then
    section 2 '^step time, even blocks with .* / hapt.s plan: median @ ' run lab
    section 2 '^(predicted|own) against measured steps: median error @ %, largest @ %,' run schedules
fi
# A section that is added has a smoke run: `compare` and `hap` are programs of their own.
for name in $(sed -n 's/^usage: bench\/[a-z]* *\(\[.*\)(default.*/\1/p' bench/run bench/compare bench/hap | tr -d '[]'); do
    [[ $name =~ ^(compare|hap)$ ]] || check "section $name has a smoke run" grep -qE "^ *section .* (run|compare|hap) $name\$" tests/system/bench.sh
done
finish
