#!/usr/bin/env bash
# Installs the missing Debian or Ubuntu packages for building, testing and running hapt.
#   jobs/setup-debian.sh           build, tests, and the text for the demonstration model
#   jobs/setup-debian.sh bench     also PyTorch, which `make bench` compares with, and the digits for a test
#   jobs/setup-debian.sh judge     also SimGrid, which replays the simulator's instruction lists (make judge; 13 MB)
#   jobs/setup-debian.sh style     also the formatter, for `make format-check`
#   jobs/setup-debian.sh lab       also Slurm and tc (link shaping), for the tests on a cluster of network namespaces (tests/lab)
#   jobs/setup-debian.sh pictures  also Chromium, in which tests look at pages and pictures (hapt report --html)
# It checks whether each item works, whatever installed it. If all are present, it is quick and changes nothing.
# As root it installs. For other users it prints the command; SUDO=sudo (also: make deps SUDO=sudo) runs it. Nothing else calls sudo.
# Exit code 3: a package that hapt needs to be built or run is missing.
set -euo pipefail

bench=no judge=no lab=no pictures=no style=no
for group in "$@"; do
    case $group in
    bench) bench=yes ;;
    judge) judge=yes ;;
    lab) lab=yes ;;
    pictures) pictures=yes ;;
    style) style=yes ;;
    *)
        echo "setup-debian: error: unknown group $group" >&2
        echo "hint: the groups are bench, judge, lab, pictures and style" >&2
        exit 2
        ;;
    esac
done

missing=() essential=()
want() { # PACKAGE COMMAND...: optional; missing if COMMAND fails
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
library() { # NAME...: any of the names that pkg-config may use
    local name
    for name in "$@"; do pkg-config --exists "$name" && return; done
    return 1
}
header() { echo "#include <$1>" | gcc -E - ; }
module() { /usr/bin/python3 -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)"; }
shared() { ldconfig -p | grep -F "$1"; }
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
want python3-h5py module h5py
want libglpk-dev header glpk.h
want bible-kjv program bible
if [ $style = yes ]; then
    want clang-format program clang-format
    want clang-tidy program clang-tidy
fi
if [ $bench = yes ]; then
    want python3-torch module torch
    want libopenblas0-pthread shared libopenblas.so.0 # without it PyTorch computes with the reference BLAS, fifty times slower
    want python3-sklearn module sklearn
fi
if [ $judge = yes ]; then
    want libsimgrid-dev program smpirun
fi
if [ $lab = yes ]; then
    want iproute2 program tc
    want munge program munged
    want slurm-wlm program slurmctld
fi
if [ $pictures = yes ]; then
    want chromium eval 'program chromium || program chromium-browser || program google-chrome'
fi
[ ${#missing[@]} -gt 0 ] || exit 0

# If packages cannot be installed, go on unless an essential one is missing.
leave() {
    [ ${#essential[@]} -eq 0 ] && exit 0
    echo "setup-debian: error: hapt cannot be built without: ${essential[*]}" >&2
    echo "hint: $1" >&2
    exit 3
}
if ! command -v apt-get >/dev/null; then
    echo "setup-debian: not a Debian or Ubuntu system; not found here: ${missing[*]} (Debian's names)" >&2
    leave "load modules that provide them, or install them; mpicc and pkg-config must find them"
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
