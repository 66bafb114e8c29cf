#!/usr/bin/env bash
# hapt cluster init: cluster files from this machine, from sinfo and from nvidia-smi, as sites print them. Each file loads and can be planned
# with. Unknown devices and wrong input are one clear error (unit/inventory.c has more of them).
# Runs beside others: it measures no time.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1
file=$scratch/c.json
init() { passes 1 cluster init --overwrite yes --output "$file" "$@"; }
says() { check "no /$1/ in: $(cat "$scratch/out")" grep -qE -- "$1" "$scratch/out"; }
# holds EXPRESSION: over the file (d) and its subclusters (s)
holds() {
    check "$1 in $(cat "$file")" /usr/bin/python3 -c '
import json, sys
d = json.load(open(sys.argv[1])); s = d["subclusters"]
sys.exit(0 if eval(sys.argv[2]) else 1)' "$file" "$1"
}
loads() { passes 1 topology --cluster "$file" --json; }
"$HAPT" model gpt --layers 4 --hidden 64 --heads 2 --sequence 32 --vocab 64 --microbatch 8 --output "$scratch/m.h5" >/dev/null || exit 1
plans() { passes 1 plan --input "$scratch/m.h5" --cluster "$file" --predict --microbatches 4 --layers-per-model 6; }

# A Slurm site: two partitions share nodes, sockets in GRES, memory by a feature, a drained and a silent node, MIG, a node without GPUs.
cat >"$scratch/sinfo" <<'S'
HOSTNAMES STATE CPUS MEMORY GRES AVAIL_FEATURES
gpu01 idle 64 515000 gpu:a100:4(S:0-1) ib,a100_80gb
gpu02 mixed 64 510000 gpu:a100:4(S:0-1) ib,a100_80gb
gpu02 mixed 64 510000 gpu:a100:4(S:0-1) ib,a100_80gb
gpu03 drained 64 515000 gpu:a100:4(S:0-1) ib,a100_80gb
gpu04 allocated 40 380000 gpu:v100:8(S:0,1),nvme:1 volta,32gb
gpu05 idle* 40 380000 gpu:v100:8 volta,32gb
mig01 idle 64 515000 gpu:a100_1g.5gb:7,gpu:nvidia_a100_3g.20gb:2 ib
old01 idle~ 24 128000 gpu:rtx_2080_ti:4 (null)
cpu01 idle 128 256000 (null) avx512
S
init --sinfo "$scratch/sinfo"
holds '[(c["device"], c["nodes"], c["devices_per_node"]) for c in s] == [("A100-80GB", 2, 4), ("V100-32GB", 1, 8), ("RTX-2080Ti", 1, 4)]'
holds 'len({c["name"] for c in s}) == 3 and [l["bandwidth"] for l in d["links"]] == ["1.25 GB/s"] * 3'
holds 's[0]["intra_node_bandwidth"] == "300 GB/s" and s[0]["inter_node_bandwidth"] == "1.25 GB/s" and s[0]["host"] == {"memory": "534 GB"}'
says 'left out: 2 nodes that are down or drained: gpu03, gpu05$'
says 'left out: MIG slices of 2 resources'
says 'left out: 1 node without a GPU'
says 'inter_node_bandwidth of a100-80gb: 10 Gbit/s is assumed'
says 'bandwidth of 3 links between subclusters: 10 Gbit/s is assumed'
for known in 'a100-80gb: 300 GB/s between two A100-80GB' 'rtx-2080ti: .* between two RTX-2080Ti'; do says "intra_node_bandwidth of $known, by data sheet"; done
loads
check "the file as it loads" /usr/bin/python3 -c '
import json, sys
d = json.load(open(sys.argv[1]))
assert [l["bandwidth"] for l in d["links"] if l["between"][0] != l["between"][1]] == [1.25e9] * 3, d["links"]
assert [s["device"]["memory"] for s in d["subclusters"]] == [80e9, 32e9, 11e9]' "$scratch/out"
plans

# It may have been edited since: it is replaced on request only.
cp "$file" "$scratch/edited.json"
refuses 2 'exists, and may have been edited' 1 cluster init --sinfo "$scratch/sinfo" --output "$file"
check "an edited file stays" cmp -s "$file" "$scratch/edited.json"

# From standard input, with other columns, separators and words; types in features; a site with several names for one GPU.
printf 'PARTITION|NODELIST|GRES|FEATURES\r\ngpu*|n1|gpu:2|xeon,p100\r\ngpu*|n2|gpu:tesla:no_consume:2|p100\r\ngpu*|n3|gpu:nvidia_geforce_rtx_3090:8(S:0-1)|(null)\r\ngpu*|n4|gpu:rtx3090:8|(null)\r\ngpu*|n5|gpu:3090:8|(null)\r\n' >"$scratch/piped"
checks=$((checks + 1))
timeout 60 "$HAPT" cluster init --sinfo - --overwrite --output "$file" <"$scratch/piped" >"$scratch/out" 2>"$scratch/err" || fail "standard input: $(cat "$scratch/err")"
holds '[(c["device"], c["nodes"], c["devices_per_node"]) for c in s] == [("P100", 2, 2), ("RTX-3090", 3, 8)] and "host" not in s[0]'
loads

# Which A100 it is, nothing tells: the smaller one, with a note.
printf 'HOSTNAMES GRES\nn1 gpu:a100:8\n' >"$scratch/vague"
init --sinfo "$scratch/vague"
holds 's[0]["device"] == "A100-40GB" and s[0]["nodes"] == 1 and "inter_node_bandwidth" not in s[0] and d["links"] == []'
says '"a100" may have more memory than A100-40GB'
# A mixed node is two subclusters.
printf 'HOSTNAMES GRES\nn1 gpu:l4:2,gpu:t4:6\nn2 gpu:l4:2,gpu:t4:6\n' >"$scratch/mixed"
init --sinfo "$scratch/mixed"
holds '[(c["device"], c["nodes"], c["devices_per_node"]) for c in s] == [("L4", 2, 2), ("T4", 2, 6)]'
holds '[(c["inter_node_bandwidth"], c["inter_node_latency"]) for c in s] == [("1.25 GB/s", "50 us")] * 2'
for name in l4 t4; do says "inter_node_bandwidth of $name: 10 Gbit/s is assumed"; done
says 'bandwidth of 1 link between subclusters: 10 Gbit/s is assumed'
plans
# Nodes without GPUs: their CPUs.
printf 'HOSTNAMES STATE CPUS MEMORY GRES\nc1 idle 32 128000 (null)\nc2 idle 32 128000 (null)\n' >"$scratch/cpus"
init --sinfo "$scratch/cpus"
holds 's[0]["nodes"] == 2 and s[0]["device"]["name"] == "cpu" and s[0]["device"]["peak_flops"]["fp32"] == 32 * 0.096e12 and s[0]["device"]["memory"] == 128000 * 2**20'
plans

# nvidia-smi: one file for each kind of node.
printf 'NVIDIA A100-SXM4-40GB, 40960 MiB\n%.0s' 1 2 3 4 5 6 7 8 >"$scratch/a100.csv"
printf 'name, memory.total [MiB]\nTesla V100-SXM2-32GB, 32768 MiB\nTesla V100-SXM2-32GB, 32768 MiB\nNVIDIA GeForce RTX 4090, 24564\n' >"$scratch/mix.csv"
init --nvidia-smi "$scratch/a100.csv=4" --nvidia-smi "$scratch/mix.csv"
holds '[(c["device"], c["nodes"], c["devices_per_node"]) for c in s] == [("A100-40GB", 4, 8), ("V100-32GB", 1, 2), ("RTX-4090", 1, 1)]'
loads
plans
# A GPU whose memory leaves no room for CUDA's context gets 1.5 GB less; the least of all counts.
printf 'NVIDIA L4, 23034 MiB\nNVIDIA L4, 22500 MiB\n' >"$scratch/l4.csv"
init --nvidia-smi "$scratch/l4.csv=2"
holds '[(c["device"], c["memory"], c["devices_per_node"]) for c in s] == [("L4", "22 GB", 2)]'
says 'memory of L4: 22.1 GB of 23.6 GB'
loads
plans

# This machine, with and without measured links; a machine that hwloc fakes: its GPUs are described although this build cannot drive them.
init
holds 'len(s) == 1 and s[0]["device"]["backend"] == "cpu" and s[0]["devices_per_node"] == 1'
loads
passes 3 cluster init --overwrite --output "$file"
holds 's[0]["devices_per_node"] == 3 and len(s[0]["hosts"]) == 1 and s[0]["intra_node_bandwidth"].endswith("B/s")'
passes 3 topology --cluster "$file"
passes 3 plan --input "$scratch/m.h5" --cluster "$file" --predict --microbatches 4 --layers-per-model 6
HWLOC_XMLFILE=$PWD/tests/data/gpu-node.xml init
holds 's[0]["device"] == "A100-40GB" and s[0]["devices_per_node"] == 1'
says 'left out: GPU PCI device 10de:ffff of host gpu-node-7'
says 'start one rank for each GPU to measure'
plans

# Refusals: nothing is written.
gone=$scratch/gone.json
refused() { # CODE PATTERN ARGUMENTS...
    local code=$1 pattern=$2
    shift 2
    refuses "$code" "$pattern" 1 cluster init --output "$gone" "$@"
    check "nothing is written" test ! -e "$gone"
}
hints() { check "no hint /$1/ in: $(cat "$scratch/err")" grep -qE "^hint: .*$1" "$scratch/err"; }
printf 'HOSTNAMES GRES\nn1 gpu:a100:4\nn2 gpu:rtx_a600:4\n' >"$scratch/bad"
refused 3 'bad: line 3: the device database has no GPU "rtx_a600"' --sinfo "$scratch/bad"
hints 'did you mean RTX-A6000\?'
head -c 20000000 /dev/zero | tr '\0' 'x' >"$scratch/bad"
refused 3 'is larger than 16 MiB' --sinfo "$scratch/bad"
refused 3 'cannot read .*nowhere' --sinfo "$scratch/nowhere"
refused 3 'cannot read' --sinfo "$scratch"
printf 'No devices were found\n' >"$scratch/bad"
refused 3 'line 1: "No devices were found"' --nvidia-smi "$scratch/bad"
refused 2 'names no file' --nvidia-smi ,
for nodes in 0 x; do refused 2 'bad value' --nvidia-smi "$scratch/a100.csv=$nodes"; done
refused 2 'exclude each other' --sinfo "$scratch/sinfo" --nvidia-smi "$scratch/a100.csv"
refuses 2 'does one thing' 1 cluster --output "$gone"
refuses 2 'does one thing' 1 cluster start --output "$gone"
refuses 2 'needs --output' 1 cluster init
refuses 2 'is the input' 1 cluster init --sinfo "$scratch/sinfo" --output "$scratch/sinfo"
refuses 2 'is not a cluster file' 1 cluster init --sinfo "$scratch/sinfo" --output "$scratch/m.h5"
refuses 6 'cannot be written' 1 cluster init --sinfo "$scratch/sinfo" --output /proc/nowhere/c.json
printf 'HOSTNAMES GRES\nn gpu:k80:1\n' >"$scratch/bad"
refuses 3 'no GPU "k80"' 2 cluster init --output "$gone" --sinfo "$scratch/bad"
finish
