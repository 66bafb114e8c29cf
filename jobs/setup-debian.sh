#!/usr/bin/env bash
# Installs what this machine lacks for building, testing and running hapt, from Debian's or Ubuntu's packages.
#   jobs/setup-debian.sh           build, tests, and the text that the demonstration model learns
#   jobs/setup-debian.sh bench     also PyTorch, the peer that `make bench` runs beside, and the digits that a test learns
#   jobs/setup-debian.sh lab       also Slurm and what shapes links, for the tests on a cluster of network namespaces (tests/lab)
# It asks for each thing whether it works here, whoever installed it, so it is quick and changes nothing when all is there.
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

missing=()
need() { # PACKAGE COMMAND...
    local package=$1
    shift
    "$@" >/dev/null 2>&1 </dev/null || missing+=("$package")
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
need hdf5-tools program h5dump
need libdnnl-dev header oneapi/dnnl/dnnl.h
need libjansson-dev library jansson
need libpetsc-real-dev library petsc PETSc
need libglpk-dev header glpk.h
need python3-h5py module h5py
need bible-kjv program bible
if [ $bench = yes ]; then
    need python3-torch module torch
    need python3-sklearn module sklearn
fi
if [ $lab = yes ]; then
    need iproute2 program tc
    need munge program munged
    need slurm-wlm program slurmctld
fi
[ ${#missing[@]} -gt 0 ] || exit 0

# Where nothing can be installed (a cluster with modules, no right to), the build says itself what it lacks.
if ! command -v apt-get >/dev/null; then
    echo "setup-debian: not a Debian or Ubuntu system; not found here: ${missing[*]} (Debian's names)" >&2
    exit 0
fi
as_root=()
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || {
        echo "setup-debian: no right to install; not found here: ${missing[*]}" >&2
        echo "hint: as root: apt-get install --no-install-recommends ${missing[*]}" >&2
        exit 0
    }
    as_root=(sudo)
fi
apt() { ${as_root[@]+"${as_root[@]}"} env DEBIAN_FRONTEND=noninteractive apt-get -qq "$@" </dev/null; }
echo "setup-debian: installing ${missing[*]}" >&2
# The package lists of a fresh machine or container are often empty or old.
if ! apt install -y --no-install-recommends "${missing[@]}" >/dev/null 2>&1; then
    apt update >&2
    apt install -y --no-install-recommends "${missing[@]}" >&2
fi
