#!/usr/bin/env bash
# Long work shows progress with an estimate of its end. Measuring beyond a budget is refused. A run that differs from its prediction says
# so. HAPT_LONG=1: a plan that takes a minute.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1
export OMP_NUM_THREADS=1

model() { # NAME OPTIONS...
    local name=$1
    shift
    passes 1 model "$@" --output "$scratch/$name.h5"
}
model huge gpt-39b
model long gpt --layers 8 --hidden 512 --heads 8 --sequence 1024 --vocab 1024 --microbatch 16
model small gpt --layers 4 --hidden 128 --heads 4 --sequence 64 --vocab 256 --microbatch 2
cat >"$scratch/one.json" <<'JSON'
{ "format": "hapt-cluster", "version": 1,
  "subclusters": [ { "name": "cpu", "nodes": 1, "devices_per_node": 1, "device": "cpu", "memory": "100 TB" } ] }
JSON

# measuring that would take over 60 s, or over half of the free memory, is refused; nothing is written
begun=$SECONDS
refuses 2 'measuring this model here would take about .*, more than 60.00 s' 1 plan --input "$scratch/long.h5" --threads 1
check "ways out are named" grep -Eq '^hint: .*--cluster C.json.*--predict yes.*--profile-seconds [0-9]+' "$scratch/err"
refuses 2 'measuring this model here would take' 1 profile --input "$scratch/long.h5" --threads 1 --profile-seconds 5 --output "$scratch/no.h5"
refuses 2 'measuring this model here would take' 1 profile --input "$scratch/long.h5" --threads 1 --calibrate "$scratch/no.h5"
refuses 2 'measuring this model would take .* more than half of its free memory' 1 plan --input "$scratch/huge.h5" --cluster "$scratch/one.json" --threads 1
refuses 2 'measuring this model' 1 profile --input "$scratch/huge.h5" --threads 1 --output "$scratch/no.h5"
head -c 200000 /dev/zero | tr '\0' 'a' >"$scratch/text"
passes 1 data "$scratch/text" --type bytes --output "$scratch/t.h5"
refuses 2 'measuring this model' 2 --input "$scratch/long.h5" --data "$scratch/t.h5" --threads 1 --steps 1 --output "$scratch/no"
check "the job's ways out are named" grep -Eq '^hint: .*--predict yes.*--profile.*--plan' "$scratch/err"
check "refused at once: $((SECONDS - begun)) s" [ $((SECONDS - begun)) -le 40 ]
check "nothing is written" [ ! -e "$scratch/no.h5" ] && [ ! -e "$scratch/no/run.h5" ]
passes 1 plan --input "$scratch/long.h5" --predict yes --threads 1
# with a larger limit it is allowed
timeout 4 "$HAPT" profile --input "$scratch/long.h5" --threads 1 --profile-seconds 100000 --output "$scratch/no.h5" >"$scratch/out" 2>"$scratch/err"
check "it measures all the same, until it is stopped: $(cat "$scratch/err")" [ "$(grep -c 'error: measuring' "$scratch/err")" -eq 0 ]
check "and says where it is" grep -Eq '^hapt: timing layers [0-9]+/[0-9]+, [0-9]+ s (left|so far)$' "$scratch/err"

# long phases print lines with an estimate, short ones print none
passes 1 profile --input "$scratch/small.h5" --threads 1 --profile-seconds 1 --output "$scratch/p.h5"
check "a quick profile is silent: $(cat "$scratch/err")" [ "$(grep -c ' s left\| s so far' "$scratch/err")" -eq 0 ]
if [ "${HAPT_LONG:-0}" != 0 ]; then
    begun=$SECONDS
    passes 1 plan --input "$scratch/huge.h5" --cluster inputs/clusters/site-1024.json --layers-per-model 300 --microbatches 128
    if [ $((SECONDS - begun)) -ge 6 ]; then # a phase took 3 s or more; some do not know their end
        check "a long plan shows how far it is: $(cat "$scratch/err")" grep -Eq '^hapt: (predicting|planning).*, [0-9]+ s (left|so far)$' "$scratch/err"
    fi
fi

# the possible error of measured times is printed and stored with them
passes 1 profile --input "$scratch/small.h5" --threads 1 --profile-seconds 4 --output "$scratch/p.h5" --json
lasted=$(sed -n 's/.*"seconds": \([0-9.]*\).*/\1/p' "$scratch/out")
check "its rounds are apart in time: $lasted s" awk -v s="$lasted" 'BEGIN { exit !(s > 0.5 && s < 8) }' # without pauses they take 0.2 s
noise=$(sed -n 's/.*"noise": \([0-9.e-]*\).*/\1/p' "$scratch/out")
check "the noise is told: $noise" awk -v n="$noise" 'BEGIN { exit !(n > 0 && n < 10) }'
check "the file has it" [ "$(h5dump -a /noise "$scratch/p.h5" | sed -n 's/.*(0): //p' | awk -v n="$noise" '{ print ($1 / n > 0.999 && $1 / n < 1.001) }')" = 1 ]
check "a warning comes with much of it" [ "$(awk -v n="$noise" 'BEGIN { print (n > 0.1) }')" -eq "$(grep -c 'warning: the devices' "$scratch/err")" ]

# a profile whose times are a tenth, or thirty times as long: the run says so once, and its file records it
/usr/bin/python3 - "$scratch" <<'PYTHON' || exit 1
import shutil, sys
import h5py
for name, factor in (("tenth", 1 / 10), ("thirtyfold", 30)):
    path = f"{sys.argv[1]}/{name}.h5"
    shutil.copy(f"{sys.argv[1]}/p.h5", path)
    with h5py.File(path, "r+") as file:
        for table in ("stage_time", "stage_forward_time", "step_time", "weight_time"):
            values = file["cluster_0"][table][...]
            attributes = dict(file["cluster_0"][table].attrs)
            del file["cluster_0"][table]
            file["cluster_0"][table] = factor * values
            file["cluster_0"][table].attrs.update(attributes)
PYTHON
[ "${HAPT_LONG:-0}" != 0 ] && steps=150 || steps=80
for name in tenth ${HAPT_LONG:+p} thirtyfold; do
    passes 1 plan --profile "$scratch/$name.h5" --input "$scratch/small.h5" --microbatches 4 --output "$scratch/plan-$name.h5"
    passes 1 train --input "$scratch/small.h5" --data "$scratch/t.h5" --threads 1 --plan "$scratch/plan-$name.h5" --steps $steps --output "$scratch/$name"
    grep 'warning: step [0-9]*: a step lasts' "$scratch/err" >"$scratch/$name.said"
    "$HAPT" report --input "$scratch/$name/run.h5" >"$scratch/$name.report"
    check "$name: the run file holds it" [ "$(grep -c '^warning .*a step lasts' "$scratch/$name.report")" -eq "$(grep -c . "$scratch/$name.said")" ]
done
check "a tenth: $(cat "$scratch/tenth.said")" grep -Eq 'lasts ([2-9]|[1-9][0-9]+)\.[0-9]+ times as long as predicted \(.*, predicted .*what else runs.*--run' "$scratch/tenth.said"
check "thirtyfold: $(cat "$scratch/thirtyfold.said")" grep -Eq 'lasts 0\.[0-4][0-9]* times as long as predicted \(.*, predicted .*--run' "$scratch/thirtyfold.said"
check "once each" [ "$(cat "$scratch/tenth.said" "$scratch/thirtyfold.said" | grep -c .)" -eq 2 ]
# Other users may slow the machine for a while. Then a profile that was measured before is wrong, too.
[ -s "$scratch/p.said" ] && note "the measured profile itself: $(cat "$scratch/p.said")"

# the correction that the hint suggests
passes 1 plan --profile "$scratch/tenth.h5" --run "$scratch/tenth/run.h5" --microbatches 4
check "the profile is corrected" grep -Eq 'stages took ([2-9]|[1-9][0-9]+)\.[0-9]+ times as long' "$scratch/err"
finish
