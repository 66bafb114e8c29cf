#!/usr/bin/env bash
# The bundle for a machine with a GPU (jobs/gpu-bundle.sh). It is unpacked where this machine's CUDA, MPI, HDF5 and Python packages are
# hidden, and runs with the host CUDA (tests/gpu/host). Checks the results file. HAPT_LONG=1: every part.
# Runs beside others: it measures no time.
. tests/system/lib.sh.inc
host=$HAPT_BUILD/tests/gpu/hapt-cuda-host.so
[ -e "$host" ] || { echo "no $host"; exit 77; }
unshare -m true 2>/dev/null || { echo "no mount namespaces here (it takes root)"; exit 77; }
command -v make >/dev/null || { echo "no make"; exit 77; }

plugin=$HAPT_BUILD/hapt-cuda.so
real=yes
[ -e "$plugin" ] || { plugin=$host && real=; }
make -s -o deps VARIANT="${HAPT_BUILD##*/}" BUILD="${HAPT_BUILD#"$PWD"/}" bundle-parts >"$scratch/said" 2>&1 &&
    jobs/gpu-bundle.sh "$HAPT_BUILD/bundle" "$plugin" "$scratch/bundle.tar.gz" >>"$scratch/said" 2>&1
code=$?
check "the bundle: $(tail -n 3 "$scratch/said")" test $code -eq 0
tar -xzf "$scratch/bundle.tar.gz" -C "$scratch" || exit 1
tree=$scratch/hapt-gpu
cp "$host" "$tree/hapt-cuda-host.so"

# A typical virtual environment: python3 is a link to it, and CUDA's libraries are among its packages. Its Python records what it sees.
version=$(/usr/bin/python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
packages=$scratch/venv/lib/python$version/site-packages
mkdir -p "$scratch"/{venv/bin,bin,empty,cuda,kept} "$packages"/nvidia/{cu13,cudnn,nccl}/lib
cat >"$scratch/venv/bin/python3" <<SCRIPT
#!/bin/sh
echo "LD_LIBRARY_PATH=\$LD_LIBRARY_PATH" >>"$scratch/seen"
PYTHONPATH=$packages exec /usr/bin/python3 "\$@"
SCRIPT
chmod +x "$scratch/venv/bin/python3"
ln -s "$scratch/venv/bin/python3" "$scratch/bin/python3"

# bare COMMAND...: runs with these hidden. A library that is searched outside the bundle is an empty file there, which the loader refuses.
cat >"$scratch/bare" <<SCRIPT
#!/usr/bin/env bash
set -e
: >"$scratch/nothing"
shopt -s nullglob
cuda=\$(readlink -f "${CUDA_HOME:-/usr/local/cuda}") || true
[ ! -d "\$cuda/lib64/" ] || mount --bind "\$cuda/lib64/" "$scratch/cuda"
[ ! -d /usr/lib/python3/dist-packages ] || mount --bind /usr/lib/python3/dist-packages "$scratch/kept"
for folder in "\$cuda" /usr/lib/*-linux-gnu/{openmpi,pmix*,ucx,libfabric,hdf5} /usr/share/openmpi /usr/lib/python3/dist-packages; do
    [ ! -d "\$folder" ] || mount --bind "$scratch/empty" "\$folder"
done
for library in "$tree"/lib/lib{mpi,open-,pmix,hwloc,jansson,dnnl,hdf5_openmpi,event}*; do
    for file in /usr/lib/*-linux-gnu/"\${library##*/}"; do
        [ ! -e "\$file" ] || mount --bind "$scratch/nothing" "\$(readlink -f "\$file")"
    done
done
for program in mpirun orted nvcc; do
    file=\$(command -v \$program) || continue
    [ ! -s "\$file" ] || mount --bind "$scratch/nothing" "\$(readlink -f "\$file")"
done
cd "$scratch"
exec env -i HOME=/nowhere TERM=dumb "\$@"
SCRIPT
bare() { unshare -m bash "$scratch/bare" "$@"; }
line_of() { grep "\"part\": \"$1\"" "$tree/results.jsonl" | tail -n 1; }
ended() { # PART STATUS [PATTERN]
    check "$1 is $2: $(line_of "$1")" grep -qE "\"status\": \"$2\".*${3:-}" <(line_of "$1")
}
path=/usr/bin:/bin simulated=(HAPT_CUDA_PLUGIN="$tree/hapt-cuda-host.so" HAPT_HOST_GPUS=2)

# 1. Without any Python package: compiled parts run, and the others name what they need.
bare PATH=$path "${simulated[@]}" HAPT_TEST_QUICK=1 "$tree/run" check '^(doctor|kernels_flat|groups|operators loss|collectives|benchmark operators)' >"$scratch/said" 2>&1
code=$?
check "the parts that need no package: $(cat "$scratch/said")" test $code -eq 0
ended doctor passed
ended kernels_flat passed '"checks": [1-9]'
ended "groups of one rank" passed
ended "benchmark operators" passed '"attention_ms"'
ended "operators loss" skipped 'lacks numpy'
ended collectives skipped 'lacks numpy h5py'

# 2. With a virtual environment first on the PATH. Scripts start, which shows that all they import is in the bundle.
for package in numpy h5py; do
    for path_of in /usr/lib/python3/dist-packages/$package*; do
        if [ -d "$path_of" ]; then ln -s "$scratch/kept/${path_of##*/}" "$packages/${path_of##*/}"; fi
    done
done
: >"$scratch/seen"
parts='^(operators loss|profiles)'
[ "${HAPT_LONG:-0}" = 0 ] || parts=
bare PATH="$scratch/bin:$path" "${simulated[@]}" ${parts:+HAPT_TEST_QUICK=1} "$tree/run" check "$parts" >"$scratch/said" 2>&1
code=$?
check "the parts of Python: $(cat "$scratch/said")" test $code -eq 0
ended "operators loss" passed '"checks": [1-9]'
ended profiles passed '"checks": [1-9]'
bare PATH="$scratch/bin:$path" "${simulated[@]}" "$tree/run" bash -c 'cd '"$tree"' && exec python3 tests/gpu/collectives.py none' >"$scratch/said" 2>&1
check "collectives starts: $(cat "$scratch/said")" grep -q ' 0 failed$' "$scratch/said"
check "the bundle's libraries are hidden from Python: $(sort -u "$scratch/seen")" test "$(sort -u "$scratch/seen")" = "LD_LIBRARY_PATH="
bare PATH="$path" "$tree/run" mpirun --oversubscribe --bind-to none -np 2 hapt --help >"$scratch/said" 2>&1
code=$?
check "the launcher: $(cat "$scratch/said")" test $code -eq 0
if [ -z "$parts" ]; then
    sed 's/^/  /' "$tree/results.jsonl" >&2
    for name in nvidia-smi "benchmark PyTorch compiled"; do check "$name names what is missing" test "$(line_of "$name" | grep -vc skipped)" -eq 0; done
    check "each part ends within its limit, or says what it needs" test -z "$(grep -E '"status": "(failed|timeout)"|s of all parts are over' "$tree/results.jsonl")"
fi
check "every line is JSON" python3 -c 'import json, sys; [json.loads(line) for line in open(sys.argv[1])]' "$tree/results.jsonl"

# 3. The plug-in of the real toolkit: a missing library is a failure; among the packages of Python it is found.
if [ -n "$real" ]; then
    bare PATH="$scratch/bin:$path" HAPT_CUDA_PLUGIN="$tree/build/release/hapt-cuda.so" "$tree/run" check doctor >"$scratch/said" 2>&1
    code=$?
    check "a library that is missing: $(cat "$scratch/said")" test $code -eq 1
    ended doctor failed 'libcublasLt\.so\.[0-9]* is found neither'
    for library in cublasLt:cu13 cudnn:cudnn nccl:nccl; do
        for file in "${CUDA_HOME:-/usr/local/cuda}"/lib64/lib"${library%:*}"*.so.*; do
            [ ! -e "$file" ] || ln -sf "$scratch/cuda/${file##*/}" "$packages/nvidia/${library#*:}/lib/"
        done
    done
    bare PATH="$scratch/bin:$path" HAPT_CUDA_PLUGIN="$tree/build/release/hapt-cuda.so" "$tree/run" hapt doctor >"$scratch/said" 2>&1
    for library in cublasLt cudnn nccl; do
        [ ! -e "$(ls "${CUDA_HOME:-/usr/local/cuda}"/lib64/lib$library.so.* 2>/dev/null | head -n 1)" ] ||
            check "$library: $(cat "$scratch/said")" grep -q "^  lib$library.so.*/site-packages/nvidia/.*/lib/lib$library.so" "$scratch/said"
    done
fi
finish
