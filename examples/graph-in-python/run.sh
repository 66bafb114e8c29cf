#!/usr/bin/env bash
# A graph written in Python trains on four ranks, two of them half as fast.
set -eu
cd "$(dirname "$0")"
hapt=$(realpath "${HAPT:-../../build/hapt}")
rm -rf out && mkdir out
for k in $(seq 1 400); do echo "$k bottles of beer on the wall, $k bottles of beer."; done >out/text.txt

/usr/bin/python3 model.py out/model.h5
"$hapt" check out/model.h5
"$hapt" ops attention
"$hapt" data out/text.txt --type bytes --output out/tokens.h5
../../jobs/local.sh -np 4 "$hapt" --input out/model.h5 --data out/tokens.h5 --cluster ../../inputs/two-subclusters.json --threads 1 --predict \
    --microbatches 4 --steps 40 --output out/run
"$hapt" report --input out/run/run.h5
