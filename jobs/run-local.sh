#!/usr/bin/env bash
# Runs the main job on this machine: four CPU ranks as two unlike subclusters joined by a paced link.
set -eu
cd "$(dirname "$0")/.."
if [ "$(id -u)" -eq 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
# On one machine, shared memory is the only transport, and ranks share cores.
export OMPI_MCA_pml=${OMPI_MCA_pml:-ob1} OMPI_MCA_btl=${OMPI_MCA_btl:-self,vader}
export OMPI_MCA_mpi_yield_when_idle=${OMPI_MCA_mpi_yield_when_idle:-1}
# After Ctrl-C, mpirun gives the ranks 60 s to end the step and save.
export OMPI_MCA_odls_base_sigkill_timeout=${OMPI_MCA_odls_base_sigkill_timeout:-60}
exec mpirun --oversubscribe --bind-to none -np 4 build/hapt --input inputs/gpt.h5 \
    --cluster inputs/two-subclusters.json "$@"
