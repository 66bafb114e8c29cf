#!/usr/bin/env bash
# Files with huge declared sizes and little content. They are refused at once, without reserving memory. Each command may use 2.5 GB of
# addresses (the process with its libraries needs half a GB) and 5 s of CPU time.
# Runs beside others: it measures no time.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1
corpus=tests/fuzz/corpus
/usr/bin/python3 - "$corpus" "$scratch" <<'P' || exit 1
import json
import shutil
import sys

import h5py

corpus, scratch = sys.argv[1:]
HUGE = 1 << 60


def claim(seed, target, dataset, shape, chunks, kind, fill=None):
    """The dataset exists with that shape, but no element was written."""
    shutil.copy(f"{corpus}/{seed}", f"{scratch}/{target}")
    with h5py.File(f"{scratch}/{target}", "r+", libver="latest") as file:
        if dataset in file:
            del file[dataset]
        file.create_dataset(dataset, shape, kind, chunks=chunks, fillvalue=fill)


claim("tokens-stream.h5", "tokens-chunks.h5", "tokens", (HUGE,), (4096,), "u1")
claim("tokens-stream.h5", "tokens-fill.h5", "tokens", (HUGE,), (4096,), "u1", 7)
claim("tokens-stream.h5", "tokens-whole.h5", "tokens", (1 << 40,), None, "u1")
claim("tokens-stream.h5", "tokens-chunk.h5", "tokens", (1 << 31,), (1 << 30,), "u2", 7)
claim("model-tiny.h5", "model-shape.h5", "tensors/shape", (1 << 40, 5), (1024, 5), "i8", 3)
claim("model-tiny.h5", "model-text.h5", "operators/name", (HUGE,), (1024,), "S64", b"x")
claim("model-tiny.h5", "model-tokens.h5", "tokens", (HUGE,), (4096,), "u1", 1)
claim("profile-one.h5", "profile.h5", "cluster_0/stage_time", (1, 1 << 30, 1 << 30), (1, 64, 64), "f8", 1.0)
claim("profile-one.h5", "boundary.h5", "boundary_bytes", (1 << 45,), (64,), "f8", 1.0)
claim("plan-one.h5", "plan.h5", "stage_layers", (1 << 59, 2), (64, 2), "i4", 1)
claim("run-train.h5", "run.h5", "train/step_time", (HUGE,), (64,), "f8", 1.0)
claim("run-train.h5", "trace.h5", "trace/begin", (1 << 50,), (64,), "f8", 1.0)
for name, dataset in (("size", "shard_size"), ("loss", "history/loss"), ("parameters", "parameter_shard")):
    shutil.copytree(f"{corpus}/resume-tiny", f"{scratch}/checkpoint-{name}")
    claim("resume-tiny/manifest.h5", f"checkpoint-{name}/manifest.h5", dataset, (HUGE,), (64,), "i8", 1)
# A list of hosts that fills the megabyte that a cluster file may have.
one = json.load(open(f"{corpus}/cluster-one.json"))
one["subclusters"][0].update(nodes=65536, hosts=[f"h{i}" for i in range(65535)] + ["h0"])
json.dump(one, open(f"{scratch}/hosts.json", "w"))
P
ulimit -v 2500000 -t 5
tiny="gpt --layers 1 --hidden 8 --heads 2 --sequence 8 --vocab 16 --microbatch 2"
hostile() { refuses "$1" . 1 "${@:2}"; }
for data in chunks fill whole chunk; do
    # shellcheck disable=SC2086
    hostile 3 model $tiny --data "$scratch/tokens-$data.h5" --output "$scratch/m.h5"
done
for model in shape text tokens; do
    hostile 3 train --input "$scratch/model-$model.h5" --plan $corpus/plan-one.h5 --steps 1 --output "$scratch/run"
done
for profile in profile boundary; do hostile 3 plan --profile "$scratch/$profile.h5" --microbatches 4; done
hostile 3 simulate --plan "$scratch/plan.h5"
hostile 3 report --input "$scratch/run.h5"
hostile 3 report --input "$scratch/trace.h5" --timeline "$scratch/t.json"
for part in size loss parameters; do
    hostile 3 export --checkpoint "$scratch/checkpoint-$part" --output "$scratch/w.h5"
done
hostile 3 topology --cluster "$scratch/hosts.json"
finish
