#!/usr/bin/env bash
# Packs what a bare x86-64 machine with an NVIDIA driver and a CUDA 13 toolkit needs to run hapt and its GPU checks (make gpu-bundle):
# executable, plug-in, kernel tests, MPI and HDF5 libraries, a model with its data, and a plan. PETSc stays out. At most 50 MiB.
#   gpu-bundle.sh BUILD-FOLDER PLUG-IN OUTPUT.tar.gz
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1 plugin=$2 output=$3 most=$((50 << 20))
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
root=$stage/hapt-gpu
mkdir -p "$root"/{build/release/tests/unit,lib/openmpi,tests/gpu,inputs}

[ -e "$plugin" ] || { echo "gpu-bundle: error: no $plugin" >&2; echo "hint: make it where a CUDA toolkit is" >&2; exit 2; }
strip -o "$root/build/release/hapt-cuda.so" "$plugin"
for file in hapt tests/unit/kernels_{attention,flat,images,layers,llama,moe,patches,replay,shards}; do
    strip -o "$root/build/release/$file" "$build/$file"
done
ln -s release/hapt "$root/build/hapt"
cp tests/gpu/{run,train.py,collectives.py,profile.py,bench.py} "$root/tests/gpu/"
mkdir -p "$root/tests/system" "$root/tests/data"
cp tests/system/{families,profiles}.py "$root/tests/system/"
cp tests/data/*-small.h5 "$root/tests/data/"

# Libraries but for those of the system itself; MPI also loads its components by name, and starts ranks by its launcher.
libraries() { ldd "$@" 2>/dev/null | awk '$2 == "=>" && $3 ~ /^\// {print $3}' | grep -Ev '/(libc|libm|libdl|librt|libpthread|libresolv|ld-linux[^/]*)\.so' | sort -u; }
components=$(dirname "$(ldd "$build/hapt" | awk '/libmpi\.so/ {print $3}' | xargs readlink -f)")
components=$(find "$components" "$components/openmpi" -maxdepth 4 -name 'mca_pml_ob1.so' -print -quit)
components=${components%/*}
launcher=$(readlink -f "$(command -v mpirun)")
cp "$components"/*.so "$root/lib/openmpi/"
cp "$launcher" "$root/lib/mpirun"
cp "$(readlink -f "$(command -v orted)")" "$root/lib/orted" 2>/dev/null || true
libraries "$build/hapt" "$launcher" "$components"/*.so | while read -r library; do cp -L "$library" "$root/lib/"; done

# The model that is trained, its tokens, and a plan for one GPU of any kind.
printf '%s' '{"format": "hapt-cluster", "version": 1, "subclusters": [{"name": "gpu", "nodes": 1, "devices_per_node": 1, "device": "H100"}]}' >"$root/inputs/one-gpu.json"
[ -e inputs/gpt.h5 ] || jobs/make-inputs.sh >/dev/null
cp inputs/gpt.h5 "$root/inputs/"
"$build/hapt" plan --input inputs/gpt.h5 --cluster "$root/inputs/one-gpu.json" --microbatches 8 --output "$root/inputs/plan.h5" >/dev/null

cat >"$root/run" <<'END'
#!/usr/bin/env bash
# run hapt ARGUMENTS...    run mpirun -np 2 hapt ARGUMENTS...    run check (the GPU checks)
here=$(cd "$(dirname "$0")" && pwd)
export PATH=$here/build:$here/lib:$PATH LD_LIBRARY_PATH=$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export OMPI_MCA_mca_base_component_path=$here/lib/openmpi OPAL_LIBDIR=$here/lib OPAL_BINDIR=$here/lib
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
[ "${1:-}" = check ] && exec "$here/tests/gpu/run" build/release
exec "$@"
END
chmod +x "$root/run"
tar -C "$stage" --owner=0 --group=0 -czf "$output" hapt-gpu
bytes=$(stat -c %s "$output")
[ "$bytes" -le $most ] || { echo "gpu-bundle: error: $output has $bytes bytes, more than $most" >&2; exit 1; }
echo "$output: $((bytes >> 20)) MiB; unpack it there, then hapt-gpu/run check"
