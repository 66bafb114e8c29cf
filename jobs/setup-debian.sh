#!/usr/bin/env bash
# Installs what this machine lacks for building, testing and running hapt, from Debian's or Ubuntu's packages.
#   jobs/setup-debian.sh           build, tests, and the text that the demonstration model learns
#   jobs/setup-debian.sh bench     also PyTorch, the peer that `make bench` runs beside, and the digits that a test learns
#   jobs/setup-debian.sh lab       also Slurm and what shapes links, for the tests on a cluster of network namespaces (tests/lab)
# It asks for each thing whether it works here, whoever installed it, so it is quick and changes nothing when all is there.
# Root installs. Any other user is shown the command; SUDO=sudo (also: make deps SUDO=sudo) runs it. Nothing else ever calls sudo.
# Exit code 3: something is missing without which hapt cannot be built or run.
set -euo pipefail

bench=no lab=no
for group in "$@"; do
    case $group in
    bench) bench=yes ;;
    lab) lab=yes ;;
    *)
        echo "setup-debian: error: unknown group $group" >&2
        echo "hint: the groups are bench and lab" >&2
        exit 2
        ;;
    esac
done

missing=() essential=()
want() { # PACKAGE COMMAND...: hapt can do without
    local package=$1
    shift
    "$@" >/dev/null 2>&1 </dev/null || missing+=("$package")
}
need() {
    local before=${#missing[@]}
    want "$@"
    [ ${#missing[@]} -eq "$before" ] || essential+=("$1")
}
program() { command -v "$1"; }
library() { # any of the names pkg-config may know it by
    local name
    for name in "$@"; do pkg-config --exists "$name" && return; done
    return 1
}
header() { echo "#include <$1>" | gcc -E - ; }
module() { /usr/bin/python3 -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)"; }
toolchain() { program gcc && program make && header stdlib.h; }

need build-essential toolchain
need pkg-config program pkg-config
need libopenmpi-dev program mpicc
need openmpi-bin program mpirun
need libhwloc-dev library hwloc
need libhdf5-openmpi-dev library hdf5-openmpi hdf5
want hdf5-tools program h5dump
need libdnnl-dev header oneapi/dnnl/dnnl.h
need libjansson-dev library jansson
want libpetsc-real-dev library petsc PETSc
want libglpk-dev header glpk.h
want python3-h5py module h5py
want bible-kjv program bible
if [ $bench = yes ]; then
    want python3-torch module torch
    want python3-sklearn module sklearn
fi
if [ $lab = yes ]; then
    want iproute2 program tc
    want munge program munged
    want slurm-wlm program slurmctld
fi
[ ${#missing[@]} -gt 0 ] || exit 0

# Without the right to install, all goes on as far as it can.
leave() {
    [ ${#essential[@]} -eq 0 ] && exit 0
    echo "setup-debian: error: hapt cannot be built without: ${essential[*]}" >&2
    echo "hint: $1" >&2
    exit 3
}
if ! command -v apt-get >/dev/null; then
    echo "setup-debian: not a Debian or Ubuntu system; not found here: ${missing[*]} (Debian's names)" >&2
    leave "load modules that bring them or install them; mpicc and pkg-config must find them"
fi
if [ "$(id -u)" -ne 0 ] && [ -z "${SUDO:-}" ]; then
    {
        echo "setup-debian: not found here: ${missing[*]}. To install them, run:"
        echo "sudo apt-get update && sudo apt-get install -y --no-install-recommends ${missing[*]}"
    } >&2
    leave "run the line above, or make deps SUDO=sudo"
fi
as_root=()
[ "$(id -u)" -eq 0 ] || read -ra as_root <<<"$SUDO"
apt() { ${as_root[@]+"${as_root[@]}"} env DEBIAN_FRONTEND=noninteractive apt-get -qq "$@" </dev/null; }
echo "setup-debian: installing ${missing[*]}" >&2
# The package lists of a fresh machine or container are often empty or old.
if ! apt install -y --no-install-recommends "${missing[@]}" >/dev/null 2>&1; then
    apt update >&2
    apt install -y --no-install-recommends "${missing[@]}" >&2
fi
