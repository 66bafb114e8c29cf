#!/usr/bin/env bash
# The timeline of a run (--trace): instructions of a rank follow each other, messages leave after they were computed and are there before they
# are computed with, and the bits of the run are those without it.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1

head -c 60000 src/model/*.c >"$scratch/text.txt"
passes 1 data "$scratch/text.txt" --output "$scratch/tokens.h5"
passes 1 model gpt --layers 4 --hidden 64 --heads 2 --sequence 32 --vocab 256 --microbatch 2 --tied-embeddings yes --data "$scratch/tokens.h5" \
    --output "$scratch/m.h5"
passes 1 plan --input "$scratch/m.h5" --cluster inputs/two-hosts.json --predict yes --microbatches 5 --layers-per-model 6 \
    --stages "0-2@slow:1x2,2-4@fast:1x1,4-6@fast:1x1" --output "$scratch/plan.h5"
options="--input $scratch/m.h5 --cluster inputs/two-hosts.json --plan $scratch/plan.h5 --layers-per-model 6 --threads 1 --json"
losses() { grep -o '"loss": \[[^]]*\]' "$scratch/out"; }

# shellcheck disable=SC2086
passes 4 train $options --steps 7 --output "$scratch/none" && without=$(losses)
h5dump -n "$scratch/none/run.h5" | grep -q /trace && fail "a timeline that nobody asked for"
# shellcheck disable=SC2086
passes 4 train $options --steps 7 --trace 3 --output "$scratch/run" && with=$(losses)
checks=$((checks + 3))
[ "$with" = "$without" ] || fail "the losses with a timeline: $with; without: $without"
cat >"$scratch/look.py" <<'P'
import sys, h5py
f = h5py.File(sys.argv[1], "r")
first, end, B, last_stage = int(sys.argv[2]), int(sys.argv[3]), 5, 2
columns = {name: f["/trace/" + name][...] for name in ("rank", "stage", "peer_stage", "step", "microbatch", "begin", "end")}
kinds = [k.decode() if isinstance(k, bytes) else k for k in f["/trace/kind"][...]]
events = [dict(zip(list(columns) + ["kind"], row)) for row in zip(*columns.values(), kinds)]
assert f["/trace/begin"].attrs["units"] in ("s", b"s")
assert {e["step"] for e in events} == set(range(first, end)), {e["step"] for e in events}
assert len({e["rank"] for e in events}) == 4 and min(e["begin"] for e in events) == 0
messages = ("activations left", "activations there", "gradients left", "gradients there")
for rank in range(4):
    mine = [e for e in events if e["rank"] == rank and e["kind"] not in messages]
    for kind in ("forward", "backward"):
        for step in range(first, end):
            assert sorted(e["microbatch"] for e in mine if e["kind"] == kind and e["step"] == step) == list(range(B)), (rank, kind, step)
    for one, two in zip(mine, mine[1:]):
        assert one["begin"] <= one["end"] <= two["begin"], (one, two)
place = {e["rank"]: e["stage"] for e in events}
table = {(e["kind"], e["rank"], e["step"], e["microbatch"], e["peer_stage"]): e for e in events}
messages = 0
for step in range(first, end):
    for m in range(B):
        for sender in range(last_stage):
            for kind, word, a, b in (("forward", "activations", sender, sender + 1), ("backward", "gradients", sender + 1, sender)):
                left, there = [], []
                for rank in (r for r in place if place[r] == a):
                    if (word + " left", rank, step, m, b) in table:
                        left.append(table[word + " left", rank, step, m, b]["begin"])
                        assert table[kind, rank, step, m, -1]["end"] <= left[-1], (kind, rank, step, m)
                for rank in (r for r in place if place[r] == b):
                    there.append(table[word + " there", rank, step, m, a]["begin"])
                    taken, used = table["receive " + kind, rank, step, m, -1]["end"], table[kind, rank, step, m, -1]["begin"]
                    assert there[-1] <= taken <= used, (kind, rank, step, m, there[-1], taken, used)
                assert left and min(left) < min(there) and max(left) < max(there), (kind, step, m, left, there)
                messages += 1
assert messages == (end - first) * B * 2 * last_stage
P
/usr/bin/python3 "$scratch/look.py" "$scratch/run/run.h5" 4 7 || fail "the timeline"
# More steps than are taken: all of them; after a resumption those of the new run.
# shellcheck disable=SC2086
passes 4 train ${options/--plan */--layers-per-model 6 --threads 1} --steps 9 --trace 50 --resume --output "$scratch/run"
/usr/bin/python3 "$scratch/look.py" "$scratch/run/run.h5" 7 9 || fail "the timeline of a resumed run"
finish
