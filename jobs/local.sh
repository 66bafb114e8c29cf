#!/usr/bin/env bash
# mpirun with the settings that one machine needs: more ranks than cores, shared memory alone, also as root.
# Usage: jobs/local.sh -np 4 build/hapt ...
# Ctrl-C and SIGTERM reach the ranks as SIGUSR1: training ends its step, saves a checkpoint and exits with code 9.
set -u
if [ "$(id -u)" -eq 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
# On one machine, shared memory is the only transport, and ranks share cores. An error of hapt stands alone (--quiet).
export OMPI_MCA_pml=${OMPI_MCA_pml:-ob1} OMPI_MCA_btl=${OMPI_MCA_btl:-self,vader}
export OMPI_MCA_mpi_yield_when_idle=${OMPI_MCA_mpi_yield_when_idle:-1}
# A session of its own: mpirun would answer Ctrl-C by killing the ranks within a second.
setsid mpirun --quiet --oversubscribe --bind-to none "$@" <&0 &
launcher=$!
trap 'kill -USR1 "$launcher" 2>/dev/null' INT TERM HUP
while kill -0 "$launcher" 2>/dev/null; do wait "$launcher"; done
wait "$launcher"
