#!/usr/bin/env bash
# Adapters of a published model: import, train on two ranks, export for PEFT. The model is a tiny random Qwen3 of the tests; give a folder
# that you downloaded from Hugging Face as the argument.
set -eu
model=$(realpath "${1:-$(dirname "$0")/../../tests/data/hf/qwen3}")
cd "$(dirname "$0")"
hapt=$(realpath "${HAPT:-../../build/hapt}")
rm -rf out && mkdir out
# Your text: python3 ../../tools/hapt_tokens.py --tokenizer MODEL --output out/tokens.h5 texts/*
for k in $(seq 1 400); do echo "$k bottles of beer on the wall, $k bottles of beer."; done >out/text.txt

"$hapt" data out/text.txt --type bytes --output out/tokens.h5
"$hapt" import "$model" --sequence 32 --microbatch-rows 2 --lora rank=8,alpha=16,target=q_proj,v_proj --output out/model.h5
../../jobs/local.sh -np 2 "$hapt" --input out/model.h5 --threads 1 --predict --data out/tokens.h5 --steps 20 --output out/run
"$hapt" export --checkpoint out/run --format safetensors --output out/adapters
ls out/adapters
