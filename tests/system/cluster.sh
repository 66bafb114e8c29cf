#!/usr/bin/env bash
# hapt topology and hapt doctor as a user meets them: results, error lines, exit codes, at 1, 2 and 4 ranks.
# Runs beside others: it measures no time.
set -u
cd "$(dirname "$0")/../.." || exit 1
hapt=${HAPT:-build/hapt}
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
checks=0 failures=0

check() { # WHAT COMMAND...
    local what=$1
    shift
    checks=$((checks + 1))
    "$@" && return
    failures=$((failures + 1))
    echo "failed: $what"
    sed 's/^/    /' "$dir/err" | head -n 12
}
ranks() { # N ARGUMENTS...; output in $dir/out and $dir/err
    local n=$1
    shift
    if [ "$n" -eq 1 ]; then
        timeout 60 "$hapt" "$@" >"$dir/out" 2>"$dir/err"
    else
        # failing ranks end by themselves: mpirun need not wait before it kills the others
        OMPI_MCA_odls_base_sigkill_timeout=0 timeout 60 mpirun --oversubscribe --bind-to none -np "$n" "$hapt" "$@" >"$dir/out" 2>"$dir/err"
    fi
    code=$?
}
one_error() { # the error line comes once, followed by a hint
    [ "$(grep -c '^hapt: error: ' "$dir/err")" -eq 1 ] && [ "$(grep -c '^hint: ' "$dir/err")" -eq 1 ]
}
many="1 2 4" # numbers of ranks that must all refuse; most cases run on one rank
refused() { # WORD CODE ARGUMENTS...
    local word=$1 expected=$2 n
    shift 2
    for n in $many; do
        ranks $n "$@"
        check "$* at $n ranks: exit code $code, not $expected" [ $code -eq "$expected" ]
        check "$* at $n ranks: one error line and a hint" one_error
        check "$* at $n ranks: names $word" grep -q "^hapt: error: .*$word" "$dir/err"
    done
}
json() { # FILE EXPRESSION over the parsed object d
    /usr/bin/python3 -c 'import json, sys; d = json.load(open(sys.argv[1])); sys.exit(0 if eval("(" + sys.argv[2] + ")") else 1)' "$1" "$2"
}

# A valid file: on paper with one rank, bound and probed with four, and with one idle rank of five.
for n in 1 4 5; do
    ranks $n topology --cluster inputs/two-subclusters.json --json --output "$dir/t$n.h5"
    cp "$dir/out" "$dir/t$n.json"
    check "topology at $n ranks: exit code $code" [ $code -eq 0 ]
    check "topology at $n ranks: JSON" json "$dir/t$n.json" \
        'd["format"] == "hapt-cluster" and [s["slowdown"] for s in d["subclusters"]] == [2, 5] and
         [l["bandwidth"] for l in d["links"] if l["paced"]] == [25e6] and all(l["bandwidth"] > 0 for l in d["links"])'
    check "topology at $n ranks: HDF5" h5dump -a /format "$dir/t$n.h5" >/dev/null
done
check "an idle rank is mentioned" grep -q "1 of 5 ranks" "$dir/err"
# Collectives are measured over the ranks of the devices, with paced links. The file then contains their costs.
ranks 5 topology --cluster inputs/two-subclusters.json --collectives --json --output "$dir/c.h5"
check "topology --collectives: exit code $code" [ $code -eq 0 ]
cp "$dir/out" "$dir/c.json"
# The link allows an all-reduce of 16.7 MB/s and an all-to-all of 100 MB/s. Other load inflates the latency, and with it the fitted slope, but
# a megabyte takes no less time for it. Without pacing it would take a tenth.
check "five collectives of 4 ranks, at most as fast as the rehearsed 25 MB/s allow" json "$dir/c.json" \
    '[c["ranks"] for c in d["collectives"]] == [4] and len(d["collectives"][0]) == 6 and
     all(c["latency"] + 1e6 / c["bandwidth"] > least for c, least in
         ((d["collectives"][0]["all_reduce"], 0.054), (d["collectives"][0]["all_to_all"], 0.007))) and
     d["collectives"][0]["all_reduce"]["bandwidth"] > 5e6'
"$hapt" model gpt --layers 1 --hidden 64 --heads 2 --sequence 32 --vocab 64 --microbatch 16 --output "$dir/m.h5" >"$dir/out" 2>"$dir/err"
for from in links measured; do
    [ $from = links ] && file=inputs/two-subclusters.json || file=$dir/c.json
    ranks 1 spmd --input "$dir/m.h5" --cluster "$file" --json
    check "hapt spmd prices collectives by $from" json "$dir/out" "d['collectives_from'] == '$from'"
done
refused 'on paper' 2 topology --cluster inputs/clusters/site-1024.json --collectives
# The output of topology is a valid cluster file.
ranks 1 topology --cluster "$dir/t4.json" --json
check "topology reads its own JSON: exit code $code" [ $code -eq 0 ]
check "and prints it again unchanged" json "$dir/out" "d == json.load(open('$dir/t4.json'))"
for n in 1 3; do
    ranks $n topology --json
    check "discovery at $n ranks" json "$dir/out" \
        "sum(s['nodes'] * s['devices_per_node'] for s in d['subclusters']) == $n and d['subclusters'][0]['device']['backend'] == 'cpu'"
done
ranks 1 topology --cluster inputs/clusters/a100x4-v100x4.json
check "a GPU cluster on a laptop" grep -q "64 devices" "$dir/out"

# The cluster files of the repository: HAPT Table 2 (PFLOP/s in fp16: 8 x 312 and 8 x 125 TFLOP/s per node), its case study, and a site.
clusters=0
while read -r name subclusters devices petaflops memory links slowest; do
    clusters=$((clusters + 1))
    ranks 1 topology --cluster "inputs/clusters/$name.json" --json
    check "$name: exit code $code" [ $code -eq 0 ]
    check "$name: totals" json "$dir/out" "len(d['subclusters']) == $subclusters and
        sum(s['nodes'] * s['devices_per_node'] for s in d['subclusters']) == $devices and
        abs(sum(s['nodes'] * s['devices_per_node'] * s['device']['peak_flops']['fp16'] for s in d['subclusters']) - $petaflops * 1e15) < 1e9 and
        sum(s['nodes'] * s['devices_per_node'] * s['device']['memory'] for s in d['subclusters']) == $memory * 1e9"
    check "$name: links" json "$dir/out" "(lambda cross: len(cross) == $links and min(l['bandwidth'] for l in cross) == $slowest * 1e9 / 8 and
        all(abs(l['latency'] - 50e-6) < 1e-12 and not l['paced'] for l in cross))([l for l in d['links'] if l['between'][0] != l['between'][1]])"
    check "$name: inside its nodes, and between them" json "$dir/out" "all(
        (s['intra_node_bandwidth'], s['inter_node_bandwidth']) == {'A100-40GB': (300e9, 25e9), 'A100-80GB': (300e9, 25e9),
        'V100-32GB': (150e9, 12.5e9 if $devices > 64 else 25e9), 'H100': (450e9, 50e9)}[s['device']['name']] for s in d['subclusters'])"
done <<'LIST'
a100x1-v100x1of4 2   12   2.996  448 1  5
a100x1-v100x1    2   16   3.496  576 1  5
a100x1-v100x2    2   24   4.496  832 1  5
a100x2-v100x1    2   24   5.992  896 1  5
a100x2-v100x2    2   32   6.992 1152 1  5
a100x2-v100x4    2   48   8.992 1664 1  5
a100x4-v100x2    2   48  11.984 1792 1  5
a100x3-v100x3    2   48  10.488 1728 1  5
a100x4-v100x4    2   64  13.984 2304 1  5
case-study       2    6   1.498  224 1  5
site-1024        4 1024 445.056 59392 6 10
LIST
# HAP 7.1: two machines of 8 V100 and six of 8 P100, 10.4 Gbit/s between any two.
clusters=$((clusters + 1))
ranks 1 topology --cluster inputs/clusters/hap-v100x2-p100x6.json --json
check "HAP's cluster: exit code $code" [ $code -eq 0 ]
check "HAP's cluster: 16 V100, 48 P100, one rate between machines" json "$dir/out" "
    [(s['device']['name'], s['nodes'] * s['devices_per_node']) for s in d['subclusters']] == [('V100-16GB', 16), ('P100', 48)] and
    all(s['inter_node_bandwidth'] == 1.3e9 for s in d['subclusters']) and all(abs(l['bandwidth'] - 1.3e9) < 1 for l in d['links'] if l['between'][0] != l['between'][1])"
# A lab of three generations at 1 Gbit/s.
clusters=$((clusters + 1))
ranks 1 topology --cluster inputs/clusters/rtx4090-rtx3090-v100.json --json
check "a lab of three: exit code $code" [ $code -eq 0 ]
check "a lab of three: devices, memory, links" json "$dir/out" "
    [(s['device']['name'], s['device']['memory']) for s in d['subclusters']] == [('RTX-4090', 24e9), ('RTX-3090', 24e9), ('V100-16GB', 16e9)] and
    all(l['bandwidth'] == 1e9 / 8 for l in d['links'] if l['between'][0] != l['between'][1])"
files=(inputs/clusters/*.json)
check "every cluster file is checked" [ ${#files[@]} -eq $clusters ]

# Faked machines: a node with GPUs that this build cannot drive, a fake that hwloc cannot read, two different hosts.
export HWLOC_XMLFILE=$PWD/tests/data/gpu-node.xml
ranks 1 topology
check "the faked node's name" grep -q "^Host gpu-node-7: 1 rank, 4 cores" "$dir/out"
check "its GPU by PCI id" grep -q "GPU .*A100-40GB" "$dir/out"
check "its InfiniBand" grep -q "NIC mlx5_0" "$dir/out"
ranks 1 doctor
check "doctor: GPUs cannot be used" grep -q "^problem: host gpu-node-7: 2 of its 2 GPUs" "$dir/out"
check "which is no failure: exit code $code" [ $code -eq 0 ]
cp "$HWLOC_XMLFILE" "$dir/twin.xml"
timeout 60 env -u HWLOC_XMLFILE mpirun --oversubscribe --bind-to none -np 1 -x "HWLOC_XMLFILE=$HWLOC_XMLFILE" "$hapt" doctor : -np 1 -x "HWLOC_XMLFILE=$dir/twin.xml" "$hapt" doctor >"$dir/out" 2>"$dir/err"
code=$?
check "doctor: two hosts of one name prevent work: exit code $code" [ $code -eq 7 ]
check "... and are named" grep -q "^problem that prevents work: two hosts are called gpu-node-7" "$dir/out"
check "... with one error line" one_error
export HWLOC_XMLFILE=$PWD/tests/data/two-sockets.xml
ranks 1 topology
check "threads and networks near GPUs" [ "$(sed -n 's/^  GPU .*, near threads //p' "$dir/out" | tr '\n' ' ')" = "0-3,8-11, NIC ib0,mlx5_0 0-3,8-11, NIC ib0,mlx5_0 4-7,12-15, NIC eth1 " ]
export HWLOC_XMLFILE=/nonexistent.xml
ranks 1 topology
check "an unreadable fake: exit code $code" [ $code -eq 0 ]
check "an unreadable fake is mentioned" grep -q "^hapt: warning: .*HWLOC_XMLFILE" "$dir/err"
unset HWLOC_XMLFILE
timeout 60 mpirun --oversubscribe --bind-to none -np 2 -x "HWLOC_SYNTHETIC=numa:2(memory=64GB) core:8 pu:2" "$hapt" topology \
    --json : -np 1 -x "HWLOC_SYNTHETIC=numa:1(memory=16GB) core:4 pu:1" "$hapt" topology --json >"$dir/out" 2>"$dir/err"
check "two faked hosts are two subclusters" json "$dir/out" \
    '[s["devices_per_node"] for s in d["subclusters"]] == [2, 1] and len(d["links"]) == 3 and
     [s["device"]["memory"] for s in d["subclusters"]] == [64e9, 16e9]'

# Bad files.
bad() { # NAME SED-EXPRESSION
    sed "$2" inputs/two-subclusters.json >"$dir/$1.json"
}
bad key 's/"slowdown": 2/"slow_down": 2/'
bad unit 's/200 Mbit/200 MB/; s/256 MB/256 MB\/s/'
bad device 's/"cpu"/"A100-41GB"/'
bad link 's/\["fast", "slow"\]/["fast", "middle"]/'
bad missing 's/"nodes": 1, //'
head -c 300 inputs/two-subclusters.json >"$dir/truncated.json"
refused 'line 5: unknown key "slow_down"' 3 topology --cluster "$dir/key.json"
many=1
refused 'line 5: "memory": "256 MB/s"' 3 topology --cluster "$dir/unit.json"
refused 'line 5: unknown device "A100-41GB"' 3 topology --cluster "$dir/device.json"
"$hapt" help topology >"$dir/help"
known=$(sed -n 's/^hint: known devices: \(.*\), or an object.*/\1/p' "$dir/err" | tr -d ,)
check "the hint names the devices of the database" [ "$(wc -w <<<"$known")" -ge 28 ]
for device in $known; do check "help topology names $device" grep -qw -- "$device" "$dir/help"; done
refused 'line 9: .*"middle"' 3 topology --cluster "$dir/link.json"
refused 'line 5: "nodes" is missing' 3 topology --cluster "$dir/missing.json"
refused 'truncated.json: line 8: ' 3 topology --cluster "$dir/truncated.json"
refused 'nowhere.json' 3 topology --cluster "$dir/nowhere.json"
many="1 2"
refused 'slow_down' 3 doctor --cluster "$dir/key.json"
refused 'unknown option --clutser' 2 topology --clutser x.json

# Training needs a rank for each device of the file.
ranks 1 model gpt --layers 2 --hidden 32 --heads 2 --sequence 16 --vocab 64 --microbatch 2 --output "$dir/m.h5"
check "a model: exit code $code" [ $code -eq 0 ]
ranks 1 plan --input "$dir/m.h5" --cluster inputs/two-subclusters.json --layers-per-model 4 --output "$dir/p.h5"
check "a plan: exit code $code" [ $code -eq 0 ]
many="1 3"
refused 'the cluster has 4 devices' 3 train --input "$dir/m.h5" --plan "$dir/p.h5" \
    --cluster inputs/two-subclusters.json --output "$dir/run"
check "the hint names the number of ranks" grep -q '^hint: .*mpirun -np 4' "$dir/err"

ranks 2 topology --cluster inputs/two-subclusters.json --output /proc/nowhere/t.h5
check "an output that cannot be written: exit code $code" [ $code -eq 6 ]
check "an output that cannot be written: one error line" one_error

# Doctor: at any rank count, as text and JSON.
for n in 1 2 4; do
    ranks $n doctor --json
    check "doctor at $n ranks: exit code $code" [ $code -eq 0 ]
    check "doctor at $n ranks: JSON" json "$dir/out" \
        "d['ranks'] == $n and d['hosts'] == 1 and all(k in d['facts']['versions'] for k in ('hapt', 'MPI', 'HDF5', 'hwloc')) and
         'oneDNN' in d['facts']['back ends']['cpu'] and all(p['what'] and p['do'] for p in d['problems'])"
done
# Devices that together need a core at a quarter of its speed are possible. Twenty fast ones are not, on any machine with fewer than 28
# cores.
sed 's/"slowdown": 2/"slowdown": 1.0001/; s/"devices_per_node": 2/"devices_per_node": 1024/' inputs/two-subclusters.json \
    >"$dir/busy.json"
ranks 1 doctor --cluster "$dir/busy.json"
check "doctor warns of a rehearsal that does not fit" grep -q "problem: .*70 %" "$dir/out"

# A steady device takes the planned times, here those of a prediction that knows nothing of this machine's cores.
ranks 1 data LICENSE --output "$dir/t.h5"
ranks 1 model gpt --layers 2 --hidden 64 --heads 2 --sequence 64 --vocab 256 --microbatch 2 --data "$dir/t.h5" --output "$dir/m.h5"
printf '{"format": "hapt-cluster", "version": 1, "subclusters": [{"name": "a", "nodes": 1, "devices_per_node": 1, "device": "cpu", "slowdown": 500, "steady": true}]}' \
    >"$dir/steady.json"
ranks 1 plan --input "$dir/m.h5" --cluster "$dir/steady.json" --predict --microbatches 2 --output "$dir/p.h5"
ranks 1 train --input "$dir/m.h5" --cluster "$dir/steady.json" --plan "$dir/p.h5" --threads 1 --steps 6 --checkpoint-every 0 --output "$dir/steady-run"
check "a steady device takes the planned time" /usr/bin/python3 -c '
import h5py, sys
plan, run = (h5py.File(path, "r") for path in sys.argv[1:])
planned = plan["stage_compute"][0] - plan["stage_step"][0] / plan.attrs["microbatches"]
least = min(run["train/stage_microbatch"][:, 0])
assert 0.999 * planned <= least <= 1.2 * planned, (planned, least)' "$dir/p.h5" "$dir/steady-run/run.h5"

echo "$checks checks, $failures failed"
[ $failures -eq 0 ]
