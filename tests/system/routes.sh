#!/usr/bin/env bash
# Two hosts with two common networks. The faster one is found, saved, and used for stage boundaries. Results stay the same.
cd "$(dirname "$0")/../.." || exit 1
. tests/system/lib.sh.inc
lab=tests/lab/lab.sh
$lab missing || exit $?
export LAB_DIR="$scratch/lab" LAB_HOSTS="a0 b0"
trap '$lab down; rm -rf "$scratch"' EXIT
$lab up 50mbit || exit 1
$lab on a0 ip link add eth1 type veth peer name eth1 netns "$(cat "$LAB_DIR/b0.pid")"
for host in a0 b0; do
    $lab on $host ip addr add "10.78.0.$([ $host = a0 ] && echo 1 || echo 2)/24" dev eth1
    $lab on $host ip link set eth1 up
    $lab on $host tc qdisc add dev eth1 root tbf rate 200mbit burst 20kb limit 1000000
done
hosts() { timeout 120 $lab run -host a0:1,b0:1 -np 2 "$HAPT" "$@"; }
check() { # WHAT COMMAND...
    checks=$((checks + 1))
    "${@:2}" || fail "$1: $(tail -n 3 "$scratch/err")"
}

# MPI uses eth0 here (the lab configures it). The other network is found and measured.
cat >"$scratch/two.json" <<'JSON'
{ "format": "hapt-cluster", "version": 1,
  "subclusters": [
    { "name": "fast", "nodes": 1, "devices_per_node": 1, "device": "cpu", "hosts": ["a0"] },
    { "name": "slow", "nodes": 1, "devices_per_node": 1, "device": "cpu", "slowdown": 2, "hosts": ["b0"] } ] }
JSON
hosts topology --cluster "$scratch/two.json" --probe --json >"$scratch/probed.json" 2>"$scratch/err"
check "probing succeeds" [ $? -eq 0 ]
check "every route is listed" [ "$(sed -n '/^Routes/,/^Cluster/p' "$scratch/err" | grep -c "fast - slow")" -eq 3 ]
cat >"$scratch/judge.py" <<'PYTHON'
import json, sys
link = [l for l in json.load(open(sys.argv[1]))["links"] if l["between"] == ["fast", "slow"]][0]
# 200 Mbit/s are 25 MB/s with headers. A loaded machine may be slower, but never as slow as the other network's 6.25 MB/s.
assert link["transport"] == "tcp" and link["interfaces"] == ["eth1", "eth1"], link
assert 8e6 < link["bandwidth"] < 25e6, link
PYTHON
check "the faster network is chosen" /usr/bin/python3 "$scratch/judge.py" "$scratch/probed.json"

# Trained over it, and over MPI on the slow network: equal bits.
/usr/bin/python3 - "$scratch" <<'PYTHON'
import json, sys
cluster = json.load(open(sys.argv[1] + "/probed.json"))
for link in cluster["links"]:
    link.pop("interfaces", None)
    link["transport"] = "mpi"
json.dump(cluster, open(sys.argv[1] + "/mpi.json", "w"))
for link in cluster["links"]:
    link.update(transport="tcp", interfaces=["eth7", "eth7"])
json.dump(cluster, open(sys.argv[1] + "/absent.json", "w"))
PYTHON
data=tests/data/gpt-small.h5
"$HAPT" model gpt --layers 2 --hidden 64 --heads 4 --sequence 64 --vocab 256 --microbatch 2 --weights $data --output "$scratch/gpt.h5" >/dev/null 2>"$scratch/err" ||
    fail "no model: $(cat "$scratch/err")"
run=(--input "$scratch/gpt.h5" --data $data --microbatches 4 --steps 5 --learning-rate 1e-3 --lr-schedule constant --threads 1 --json)
"$HAPT" plan --input "$scratch/gpt.h5" --cluster "$scratch/mpi.json" --predict yes --microbatches 4 --stages "0-4@fast:1x1,4-$(
    "$HAPT" plan --input "$scratch/gpt.h5" --cluster "$scratch/mpi.json" --predict yes --stages "0-1@fast:1x1" 2>&1 | sed -n 's/.*layer 1 of //p')@slow:1x1" \
    --output "$scratch/plan.h5" >/dev/null 2>"$scratch/err" || fail "no plan: $(cat "$scratch/err")"
for way in probed mpi absent; do
    hosts "${run[@]}" --cluster "$scratch/$way.json" --plan "$scratch/plan.h5" --output "$scratch/$way" >"$scratch/out" 2>"$scratch/err"
    check "training with $way.json" [ $? -eq 0 ]
    grep -o '"loss": \[[^]]*\]' "$scratch/out" >"$scratch/$way.loss"
done
check "losses exist" [ -s "$scratch/mpi.loss" ]
check "the route does not change the losses" cmp "$scratch/probed.loss" "$scratch/mpi.loss"
check "interface names that no host has: MPI" cmp "$scratch/absent.loss" "$scratch/mpi.loss"
check "... with a message" grep -q "eth7" "$scratch/err"

# Unknown connections to every port of the fast network while ranks connect: hundreds of idle connections, with garbage between them.
cat >"$scratch/unknown.py" <<'PYTHON'
import socket, time
held, met = [], set()
def call(address, words):
    s = socket.socket()
    s.setblocking(False)
    s.connect_ex(address)
    held.append(s)
    if words: # as soon as it is connected
        s.setblocking(True)
        s.settimeout(0.2)
        try: s.sendall(words)
        except OSError: pass
end = time.time() + 60
while time.time() < end and len(held) < 900:
    for line in open("/proc/net/tcp").readlines()[1:]:
        own, _, state = line.split()[1:4]
        address = socket.inet_ntoa(bytes.fromhex(own[:8])[::-1]), int(own[9:], 16)
        if state == "0A" and address[0].startswith("10.78."):
            met.add(address)
            try:
                for i in range(60): call(address, b"" if i % 10 else b"GET / HTTP/1.1\r\n\r\n" * 3)
            except OSError: pass
            open("%s" % __import__("sys").argv[1], "w").write("%d connections to %d ports\n" % (len(held), len(met)))
time.sleep(60)
PYTHON
unknown=()
for host in a0 b0; do
    $lab on $host /usr/bin/python3 "$scratch/unknown.py" "$scratch/met-$host" &
    unknown+=($!)
done
sleep 0.5
hosts "${run[@]}" --cluster "$scratch/probed.json" --plan "$scratch/plan.h5" --output "$scratch/unknown" >"$scratch/out" 2>"$scratch/err"
check "training among unknown connections" [ $? -eq 0 ]
kill "${unknown[@]}" 2>/dev/null
grep -o '"loss": \[[^]]*\]' "$scratch/out" >"$scratch/unknown.loss"
check "unknown connections change nothing" cmp "$scratch/unknown.loss" "$scratch/mpi.loss"
cat "$scratch"/met-* 2>/dev/null # there may be none: sockets listen for milliseconds only
finish
