#!/usr/bin/env bash
# A GPT of 4 blocks learns bytes of text on four ranks, two of them half as fast.
set -eu
cd "$(dirname "$0")"
hapt=$(realpath "${HAPT:-../../build/hapt}")
rm -rf out && mkdir out
for k in $(seq 1 400); do echo "$k bottles of beer on the wall, $k bottles of beer."; done >out/text.txt

"$hapt" data out/text.txt --type bytes --output out/tokens.h5
"$hapt" model gpt --layers 4 --hidden 64 --heads 4 --sequence 64 --vocab 256 --microbatch-rows 4 --data out/tokens.h5 --output out/model.h5
../../jobs/local.sh -np 4 "$hapt" --input out/model.h5 --cluster ../../inputs/two-subclusters.json --threads 1 --predict \
    --microbatches 4 --steps 100 --warmup-steps 10 --learning-rate 3e-3 --output out/run
"$hapt" report --input out/run/run.h5
../../jobs/local.sh -np 4 "$hapt" generate --input out/model.h5 --checkpoint out/run --cluster ../../inputs/two-subclusters.json --threads 1 \
    --prompt "12 bo" --max-tokens 12
