#!/usr/bin/env bash
# A lab of three generations on paper: the plan of a 1.3-billion-parameter GPT, what limits it, and whether a faster link would help.
set -eu
cd "$(dirname "$0")"
hapt=$(realpath "${HAPT:-../../build/hapt}")
rm -rf out && mkdir out
"$hapt" model gpt --layers 24 --hidden 2048 --heads 16 --sequence 1024 --vocab 50257 --dtype bf16 --microbatch-rows 4 --output out/model.h5
"$hapt" topology --cluster cluster.json
"$hapt" plan --input out/model.h5 --cluster cluster.json --microbatches 64 --objective formula --layers-per-model 24 --explain --output out/plan.h5
"$hapt" plan --input out/model.h5 --cluster cluster.json --microbatches 64 --objective formula --layers-per-model 24 --what-if link=1..50Gbit/s:4
