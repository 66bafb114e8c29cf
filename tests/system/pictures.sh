#!/usr/bin/env bash
# Pages and pictures (hapt report --html, hapt plan --html, hapt topology --svg): well-formed, nothing from elsewhere, their numbers are those
# of the run file and of --json, hostile names are escaped, a failed write leaves the old file. HAPT_LONG: looked at in Chromium.
# Runs beside others: it measures no time.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1
/usr/bin/python3 -c 'import h5py' 2>/dev/null || { echo "needs python3-h5py"; exit 77; }
pictures() { # WHAT ARGUMENTS...: a check of pictures.py
    checks=$((checks + 1))
    /usr/bin/python3 tests/system/pictures.py "$@" >"$scratch/said" 2>&1 || fail "pictures.py $*: $(tail -n 4 "$scratch/said")"
}

# A run of two stages with a trace and validation.
head -c 20000 src/model/zoo.c >"$scratch/text.txt"
passes 1 data "$scratch/text.txt" --output "$scratch/tokens.h5"
passes 1 model gpt --layers 2 --hidden 32 --heads 2 --sequence 16 --vocab 256 --microbatch 2 --data "$scratch/tokens.h5" --output "$scratch/m.h5"
small="--input $scratch/m.h5 --cluster inputs/two-hosts.json --layers-per-model 6"
# shellcheck disable=SC2086
passes 1 plan $small --predict yes --microbatches 5 --stages "0-3@slow:1x1,3-6@fast:1x1" --output "$scratch/given.h5"
# shellcheck disable=SC2086
passes 4 train $small --plan "$scratch/given.h5" --threads 1 --steps 5 --trace 2 --validation-data "$scratch/tokens.h5" --validate-every 2 \
    --validate-rows 4 --output "$scratch/run"
passes 1 report --input "$scratch/run/run.h5" --html "$scratch/run.html" --json && cp "$scratch/out" "$scratch/run.json"
pictures run "$scratch/run.html" "$scratch/run/run.h5" "$scratch/run.json"

# A plan with rivals and the default sweep; the sweep's text stands on the page. The other answers stay as they are without a page.
# shellcheck disable=SC2086
passes 1 plan $small --predict yes --microbatches 8 --html "$scratch/plan.html" --output "$scratch/plan.h5" --json && cp "$scratch/out" "$scratch/plan.json"
# shellcheck disable=SC2086
passes 1 plan $small --predict yes --microbatches 8 --compare --json && cp "$scratch/out" "$scratch/compare.json"
sweep=$(sed -n 's:.*<h3>\(link=.*\)</h3>.*:\1:p' "$scratch/plan.html")
# shellcheck disable=SC2086
passes 1 plan $small --predict yes --microbatches 8 --loops 1 --what-if "$sweep" --json && cp "$scratch/out" "$scratch/what-if.json"
pictures plan "$scratch/plan.html" "$scratch/plan.h5" "$scratch/plan.json" "$scratch/compare.json" "$scratch/what-if.json"

# Many stages and microbatches: windows. Given stages without a model: the cluster comes from the profile.
stages=$([ "${HAPT_LONG:-0}" = 0 ] && echo 4 || echo 40)
/usr/bin/python3 tests/system/pictures.py large "$scratch/large.h5" "$scratch/stages" "$stages" || fail "a large profile"
passes 1 plan --profile "$scratch/large.h5" --microbatches 1024 --stages "$(cat "$scratch/stages")" --split-backward no \
    --html "$scratch/large.html" --output "$scratch/large-plan.h5"
pictures windows "$scratch/large.html" "$scratch/large-plan.h5"

for cluster in inputs/clusters/site-1024.json inputs/clusters/rtx4090-rtx3090-v100.json inputs/two-subclusters.json; do
    passes 1 topology --cluster $cluster --svg "$scratch/$(basename $cluster .json).svg" --json && cp "$scratch/out" "$scratch/c.json"
    pictures cluster "$scratch/$(basename $cluster .json).svg" "$scratch/c.json"
done
# Names that are markup, control characters and bytes that are not UTF-8; as many subclusters as there may be.
/usr/bin/python3 tests/system/pictures.py hostile "$scratch/hostile.json" "$scratch/run/run.h5" "$scratch/hostile.h5" || fail "hostile names"
passes 1 topology --cluster "$scratch/hostile.json" --svg "$scratch/hostile.svg" --json && cp "$scratch/out" "$scratch/c.json"
pictures cluster "$scratch/hostile.svg" "$scratch/c.json"
folder=$scratch/a\"\>\<b\>\'\&$'\xff\xe2\x28'
mkdir "$folder"
cp "$scratch/hostile.h5" "$folder/run.h5"
passes 1 report --input "$folder/run.h5" --html "$scratch/hostile.html"
pictures hostile_page "$scratch/hostile.html"

# Outputs: a page replaces a page, nothing else; what cannot be written is one error with code 6, and the old page stays.
passes 1 report --input "$scratch/run/run.h5" --html "$scratch/hostile.html"
refuses 2 "exists and is not a picture" 1 report --input "$scratch/run/run.h5" --html "$scratch/text.txt"
refuses 3 "run is a folder" 1 report --input "$scratch/run"
refuses 2 "is the input" 1 report --input "$scratch/run/run.h5" --html "$scratch/run/run.h5"
refuses 6 "cannot be written" 1 report --input "$scratch/run/run.h5" --html "$scratch/text.txt/page.html"
refuses 6 "cannot be written" 1 topology --cluster inputs/two-hosts.json --svg "$scratch/text.txt/c.svg"
# shellcheck disable=SC2086
refuses 6 "cannot be written" 1 plan $small --predict yes --html "$scratch/text.txt/page.html"
refuses 2 "html" 1 plan --profile "$scratch/large.h5" --compare --html "$scratch/p.html"
if [ -e "$HAPT_BUILD/tests/faults/faults.so" ]; then
    cp "$scratch/run.html" "$scratch/old.html"
    export FAULTS_UNDER=$scratch FAULTS_CALL=write FAULTS_AT=1 FAULTS_ERROR=ENOSPC
    LD_PRELOAD=$HAPT_BUILD/tests/faults/faults.so refuses 6 "run.html cannot be written" 1 report --input "$scratch/run/run.h5" --html "$scratch/run.html"
    unset FAULTS_UNDER FAULTS_CALL FAULTS_AT FAULTS_ERROR
    check "a page that cannot be replaced stays" cmp -s "$scratch/run.html" "$scratch/old.html"
    check "nothing is left beside it" [ -z "$(find "$scratch" -maxdepth 1 -name 'run.html?*')" ]
fi

# In a browser: what stands there is where its numbers say, and can be read.
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome)
if [ "${HAPT_LONG:-0}" = 0 ]; then
    figures="not looked at in a browser (HAPT_LONG=1)"
elif [ -z "$browser" ]; then
    figures="no browser: jobs/setup-debian.sh pictures"
else
    for page in run.html plan.html large.html site-1024.svg rtx4090-rtx3090-v100.svg hostile.svg hostile.html; do
        BROWSER=$browser pictures look "$scratch/$page" "$scratch/$page.png"
    done
    figures="looked at in a browser"
fi
finish
