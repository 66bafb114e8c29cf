#!/usr/bin/env bash
# The lab: two subclusters of hosts on one machine, joined by a slow trunk. Every host has its own network, hostname, IPC and /dev/shm.
#
#     a0 a1 ... -- switch A ==== trunk ==== switch B -- b0 b1 ...
#
#   lab.sh up [RATE]             make it; RATE of the trunk as for tc: 100mbit, 1gbit; 0: no limit
#   lab.sh trunk RATE            another rate, also while something runs
#   lab.sh run ARGUMENTS...      mpirun ARGUMENTS from a0 over all hosts (-host a0:2,b0:2 chooses)
#   lab.sh on HOST COMMAND...    a command on one host
#   lab.sh processes             what runs in it, a line each: PID, state, command
#   lab.sh down                  end it and all that runs in it
#   lab.sh missing               what this machine lacks for it, one line; ends with 77 then
#
# LAB_DIR (required) is a folder of its own; labs in different folders do not see each other. LAB_HOSTS: names, b* behind switch B and all others behind A; the
# default is "a0 a1 b0 b1". Addresses are 10.77.0.1, ... in that order. Needs root.
set -euo pipefail
[ $# -gt 0 ] || { sed -n 2,15p "$0"; exit 2; }

missing() {
    local program lacks=""
    [ "$(id -u)" -eq 0 ] || lacks="; root"
    for program in ip tc nsenter unshare mpirun; do
        command -v "$program" >/dev/null || lacks+="; the program $program"
    done
    if [ -z "$lacks" ]; then
        # A container may lack the permission for any of these.
        unshare --net --uts --ipc --mount bash -c 'mount -t tmpfs tmpfs /dev/shm && ip link add t0 type veth peer name t1 && ip link add s0 type bridge &&
            ip link set t0 up && tc qdisc add dev t0 root tbf rate 1mbit burst 10kb limit 10kb' >/dev/null 2>&1 || lacks="; network namespaces with bridges and shaping"
    fi
    [ -n "$lacks" ] || return 0
    echo "the lab needs ${lacks#; } (Debian: iproute2, openmpi-bin)"
    return 77
}
if [ "$1" = missing ]; then missing; exit; fi

D=${LAB_DIR:?"lab.sh: set LAB_DIR to a folder of the lab's own"}
mkdir -p "$D"
D=$(cd "$D" && pwd)
read -r -a HOSTS <<<"${LAB_HOSTS:-a0 a1 b0 b1}"
[ ! -s "$D/names" ] || read -r -a HOSTS <"$D/names"

pid() { cat "$D/$1.pid"; }
inside() { # NAMESPACE COMMAND...
    local name=$1
    shift
    nsenter -t "$(pid "$name")" -n -u -i -m -- "$@"
}

# A sleeping process keeps the namespaces alive.
hold() {
    unshare --net --uts --ipc --mount --propagation private setsid bash -c '
        hostname "$1"; mount -t tmpfs -o size=2g tmpfs /dev/shm; ip link set lo up; echo $$ >"$2.part"; mv "$2.part" "$2"; exec sleep infinity' \
        hold "$1" "$D/$1.pid" </dev/null >/dev/null 2>&1 &
    local turn
    for turn in $(seq 250); do
        [ ! -s "$D/$1.pid" ] || return 0
        sleep 0.02
    done
    echo "lab.sh: no namespaces for $1" >&2
    return 1
}

# A rate in bit/s.
bits() {
    case $1 in
    *gbit) awk -v x="${1%gbit}" 'BEGIN { printf "%.0f", x * 1e9 }' ;;
    *mbit) awk -v x="${1%mbit}" 'BEGIN { printf "%.0f", x * 1e6 }' ;;
    *) echo "lab.sh: a rate is like 100mbit or 1gbit, not $1" >&2; return 2 ;;
    esac
}

# Both ends of the trunk send at the rate. After a pause at most 0.4 ms of traffic passes at once, so that short messages take their time as
# well. The port's buffer is 1 MB. As in a switch, packets that do not fit are dropped.
trunk() {
    local rate=$1 side burst
    for side in A B; do
        inside "switch-$side" tc qdisc del dev trunk root 2>/dev/null || true
        [ "$rate" != 0 ] || continue
        burst=$(($(bits "$rate") / 8 * 4 / 10000))
        [ $burst -ge 10000 ] || burst=10000
        inside "switch-$side" tc qdisc add dev trunk root tbf rate "$rate" burst $burst limit 1000000
    done
}

up() {
    local host side number=1
    if [ -s "$D/names" ]; then echo "lab.sh: there is a lab in $D already" >&2; return 2; fi
    mkdir -p "$D/tmp"
    echo "${HOSTS[*]}" >"$D/names"
    for host in switch-A switch-B "${HOSTS[@]}"; do hold "$host"; done
    for side in A B; do
        inside "switch-$side" ip link add bridge type bridge
        inside "switch-$side" ip link set bridge up
    done
    inside switch-A ip link add trunk mtu 9000 type veth peer name trunk mtu 9000 netns "$(pid switch-B)"
    for side in A B; do inside "switch-$side" ip link set trunk master bridge up; done
    echo "127.0.0.1 localhost" >"$D/hosts"
    for host in "${HOSTS[@]}"; do
        side=A
        case $host in b*) side=B ;; esac
        inside "$host" ip link add eth0 mtu 9000 type veth peer name "port-$host" mtu 9000 netns "$(pid switch-$side)"
        inside "$host" ip addr add "10.77.0.$number/24" dev eth0
        inside "$host" ip link set eth0 up
        inside "switch-$side" ip link set "port-$host" master bridge up
        echo "10.77.0.$number $host" >>"$D/hosts"
        number=$((number + 1))
    done
    for host in "${HOSTS[@]}"; do inside "$host" mount --bind "$D/hosts" /etc/hosts; done
    # Replaces ssh: remote-shell HOST COMMAND...
    cat >"$D/remote-shell" <<REMOTE
#!/bin/sh
host=\$1
shift
exec nsenter -t "\$(cat "$D/\$host.pid")" -n -u -i -m -- /bin/sh -c "\$*"
REMOTE
    chmod +x "$D/remote-shell"
    trunk "${1:-0}"
}

# Open MPI's daemons stay in this session (--leave-session-attached): Linux shares cores among sessions (sched_autogroup), and where others
# compute, a session whose ranks call sched_yield() may stand still for a minute.
run() {
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    exec nsenter -t "$(pid "${HOSTS[0]}")" -n -u -i -m -- env -C "$PWD" mpirun --wdir "$PWD" \
        --mca plm rsh --mca plm_rsh_agent "$D/remote-shell" --mca plm_rsh_no_tree_spawn 1 --mca orte_tmpdir_base "$D/tmp" \
        --mca pml ob1 --mca btl self,vader,tcp --mca btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0 \
        --mca mpi_yield_when_idle 1 --leave-session-attached --bind-to none --oversubscribe "$@"
}

# The processes whose network is one of the given inodes.
inhabitants() {
    stat -L -c '%i %n' /proc/[0-9]*/ns/net 2>/dev/null | awk -F '[ /]' -v nets=" $* " 'index(nets, " " $1 " ") { print $4 }' || true
}

# The networks of the lab.
networks() {
    local name net
    for name in "${HOSTS[@]}" switch-A switch-B; do
        [ -s "$D/$name.pid" ] || continue
        net=$(stat -L -c %i "/proc/$(pid "$name")/ns/net" 2>/dev/null) || continue
        # Skip a number that another process has got since.
        [ "$net" = "$(stat -L -c %i /proc/self/ns/net)" ] || echo "$net"
    done
}

# Without those that keep the namespaces alive, and those that ended.
processes() {
    local found holders
    # shellcheck disable=SC2046
    found=$(inhabitants $(networks) | tr '\n' ,)
    holders=$(cat "$D"/*.pid | tr '\n' ' ')
    [ -z "$found" ] || ps -o pid=,stat=,args= -p "${found%,}" | awk -v holders=" $holders" '!index(holders, " " $1 " ") && $2 !~ /^Z/' || true
}

down() {
    local nets processes turn
    nets=$(networks)
    for turn in $(seq 40); do
        processes=$(inhabitants $nets)
        [ -n "$nets" ] && [ -n "$processes" ] || break
        # shellcheck disable=SC2086
        kill -$([ "$turn" -lt 20 ] && echo TERM || echo KILL) $processes 2>/dev/null || true
        sleep 0.05
    done
    rm -rf "$D/tmp" "$D"/*.pid "$D/names" "$D/hosts" "$D/remote-shell"
}

command=$1
shift
case $command in
up | trunk | run | processes | down) "$command" "$@" ;;
on) inside "$1" env -C "$PWD" "${@:2}" ;;
*) sed -n 2,15p "$0" >&2; exit 2 ;;
esac
