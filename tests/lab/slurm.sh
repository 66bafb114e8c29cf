#!/usr/bin/env bash
# A temporary Slurm on the hosts of a lab (lab.sh): partition fast on a0 and a1, slow on b0 and b1, the controller on its own host.
#
#   slurm.sh up [RATE]           the lab with a trunk of that rate, and Slurm on it
#   slurm.sh on COMMAND...       sbatch, squeue, scancel ... on the controller's host
#   slurm.sh down                end both
#   slurm.sh missing             what this machine lacks, one line; ends with 77 then
#
# LAB_DIR as for lab.sh. LAB_CORES: cores that each host claims to have, default 2. Needs root; no systemd, no accounts, no fixed path.
set -euo pipefail
[ $# -gt 0 ] || { sed -n 2,9p "$0"; exit 2; }
lab=$(dirname "$(readlink -f "$0")")/lab.sh

missing() {
    local program lacks=""
    "$lab" missing || return
    for program in munged slurmctld slurmd sbatch srun scontrol; do
        command -v "$program" >/dev/null || lacks+=" $program"
    done
    if [ -z "$lacks" ]; then
        # It needs a configuration even for this.
        local file kinds
        file=$(mktemp)
        printf 'ClusterName=lab\nSlurmctldHost=head\n' >"$file"
        kinds=$(SLURM_CONF=$file srun --mpi=list 2>&1) || true
        rm -f "$file"
        [[ $kinds == *pmix* ]] || lacks=" a Slurm with PMIx"
    fi
    [ -n "$lacks" ] || return 0
    echo "the lab's Slurm needs$lacks (Debian: slurm-wlm, munge; jobs/setup-debian.sh lab)"
    return 77
}
if [ "$1" = missing ]; then missing; exit; fi

D=${LAB_DIR:?"slurm.sh: set LAB_DIR to a folder of the lab's own"}
mkdir -p "$D"
D=$(cd "$D" && pwd)
workers=(a0 a1 b0 b1)
export LAB_DIR=$D LAB_HOSTS="a0 a1 b0 b1 head" SLURM_CONF=$D/slurm/slurm.conf
# The settings of MPI for these hosts. Jobs inherit them from where they are submitted.
export OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,vader,tcp OMPI_MCA_btl_tcp_if_include=eth0 OMPI_MCA_mpi_yield_when_idle=1

# Hosts may report more cores than the machine has. The PMIx plugin keeps its sockets in TmpFS under the job's number, so each host needs
# its own folder there.
write_configuration() {
    local cores=${LAB_CORES:-2}
    cat >"$SLURM_CONF" <<CONF
ClusterName=lab
SlurmctldHost=head(10.77.0.5)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits until its old credentials expire: two minutes by default.
AuthInfo=socket=$D/slurm/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$D/slurm/state
SlurmdSpoolDir=$D/slurm/spool.%n
TmpFS=$D/slurm/tmp.%n
SlurmctldPidFile=$D/slurm/slurmctld.pid
SlurmdPidFile=$D/slurm/slurmd.%n.pid
SlurmctldLogFile=$D/slurm/slurmctld.log
SlurmdLogFile=$D/slurm/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,batch_sched_delay=1,sched_interval=2
MpiDefault=none
ReturnToService=2
KillWait=5
MinJobAge=600
SlurmdParameters=config_overrides
NodeName=a[0-1],b[0-1] CPUs=$cores CoresPerSocket=$cores RealMemory=1000 State=UNKNOWN
PartitionName=fast Nodes=a[0-1] Default=YES MaxTime=60 State=UP
PartitionName=slow Nodes=b[0-1] MaxTime=60 State=UP
CONF
}

up() {
    local host turn
    "$lab" up "${1:-0}"
    mkdir -p "$D/slurm/state"
    chmod 755 "$D" "$D/slurm"
    write_configuration
    head -c 1024 /dev/urandom >"$D/slurm/munge.key"
    chmod 600 "$D/slurm/munge.key"
    "$lab" on head munged --force --socket="$D/slurm/munge.socket" --key-file="$D/slurm/munge.key" --pid-file="$D/slurm/munged.pid" \
        --log-file="$D/slurm/munged.log" --seed-file="$D/slurm/munged.seed"
    "$lab" on head slurmctld -f "$SLURM_CONF" -c
    for host in "${workers[@]}"; do
        mkdir -p "$D/slurm/spool.$host" "$D/slurm/tmp.$host"
        "$lab" on "$host" slurmd -f "$SLURM_CONF" -N "$host"
    done
    # Only the backfill scheduler starts heterogeneous jobs, and it runs only after a change. On a large cluster there is always one. Here a
    # job that becomes eligible again would wait for ever.
    "$lab" on head setsid bash -c 'while sleep 1; do scontrol update PartitionName=fast MaxTime=60; done' </dev/null >/dev/null 2>&1 &
    for turn in $(seq 200); do
        [ "$("$lab" on head sinfo -h -N -t idle -o %N 2>/dev/null | wc -l)" -lt 4 ] || return 0
        sleep 0.1
    done
    echo "slurm.sh: the hosts did not come up" >&2
    tail -n 5 "$D"/slurm/*.log >&2
    return 1
}

down() {
    # Daemons and jobs run on the lab's hosts and end with them.
    "$lab" down
    rm -rf "$D/slurm"
}

command=$1
shift
case $command in
up | down) "$command" "$@" ;;
on) exec "$lab" on head "$@" ;;
*) sed -n 2,9p "$0" >&2; exit 2 ;;
esac
