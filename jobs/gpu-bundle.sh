#!/usr/bin/env bash
# Packs hapt and its GPU checks (make gpu-bundle) for an x86-64 machine with an NVIDIA driver and CUDA's libraries (a toolkit, or Python's
# packages): executables, plug-in, MPI and HDF5 libraries, a model with its data, and a plan. At most 50 MiB.
#   gpu-bundle.sh BUILD-FOLDER PLUG-IN OUTPUT.tar.gz
# The executables in BUILD-FOLDER find their libraries by RPATH, so that the bundle does not change Python's environment.
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1 plugin=$2 output=$3 most=$((50 << 20))
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
root=$stage/hapt-gpu
mkdir -p "$root"/{build/release/tests/{unit,gpu},lib/openmpi,bin,tests,inputs,outputs}
fail() {
    echo "gpu-bundle: error: $1" >&2
    echo "hint: $2" >&2
    exit 2
}

[ -e "$plugin" ] || fail "no $plugin" "build it on a machine with a CUDA toolkit"
strip -o "$root/build/release/hapt-cuda.so" "$plugin"
for file in hapt tests/unit/kernels_{attention,documents,dropout,flat,group_norm,images,layers,llama,maps,moe,packed,patches,replay,shape,shards} tests/gpu/{operator,times,group}; do
    [ -e "$build/$file" ] || fail "no $build/$file" "run make gpu-bundle, which builds it"
    objdump -p "$build/$file" | grep 'RPATH.*\$ORIGIN' >/dev/null || fail "$build/$file does not look for libraries beside it" "run make gpu-bundle, which builds one that does"
    strip -o "$root/build/release/$file" "$build/$file"
done
ln -s release/hapt "$root/build/hapt"

# The scripts that tests/gpu/run starts, and all that they import. An import that is in neither the tree nor the known packages is an error.
cp --parents tests/gpu/run tests/data/*-small.h5 "$root/"
scripts=$(python3 - <<'PYTHON'
import ast, os, re, sys
FOLDERS, PACKAGES = ["tests/gpu", "tests/system"], {"numpy", "h5py", "torch"}
wanted, found = re.findall(r"tests/gpu/\w+\.py", open("tests/gpu/run").read()), set()
while wanted:
    path = wanted.pop()
    if path in found:
        continue
    found.add(path)
    if os.path.basename(path)[:-3] in sys.stdlib_module_names:  # PyTorch would import it in place of Python's
        sys.exit(f"gpu-bundle: error: {path} has the name of a module of Python\nhint: rename it")
    for node in ast.walk(ast.parse(open(path).read())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module] if isinstance(node, ast.ImportFrom) else []
        for name in (name.split(".")[0] for name in names):
            paths = [file for file in (os.path.join(folder, name + ".py") for folder in FOLDERS) if os.path.exists(file)]
            if not paths and name not in PACKAGES and name not in sys.stdlib_module_names:
                sys.exit(f"gpu-bundle: error: {path} imports {name}, which is not found\nhint: add its package to PACKAGES in jobs/gpu-bundle.sh")
            wanted += paths
print(*sorted(found), sep="\n")
PYTHON
)
xargs -d '\n' cp --parents -t "$root/" <<<"$scripts"

# Libraries except the C library's. MPI also loads its components by name, and needs its launcher to start ranks.
libraries() {
    ldd "$@" 2>/dev/null | awk '$2 == "=>" && $3 ~ /^\// {print $3}' | grep -Ev '/(libc|libm|libdl|librt|libpthread|libresolv|ld-linux[^/]*)\.so' | sort -u
}
components=$(dirname "$(ldd "$build/hapt" | awk '/libmpi\.so/ {print $3}' | xargs readlink -f)")
components=$(find "$components" "$components/openmpi" -maxdepth 4 -name 'mca_pml_ob1.so' -print -quit)
components=${components%/*}
cp "$components"/*.so "$root/lib/openmpi/"
launcher=$(readlink -f "$(command -v mpirun)")
cp "$launcher" "$root/lib/mpirun"
if command -v orted >/dev/null; then cp "$(readlink -f "$(command -v orted)")" "$root/lib/orted"; fi
libraries "$build/hapt" "$launcher" "$components"/*.so | while read -r library; do cp -L "$library" "$root/lib/"; done
chmod u+w "$root"/lib/*.so* "$root"/lib/openmpi/*.so
# A library with its own RUNPATH would ignore the executable's RPATH. So replace such tags by an unknown one, which the loader ignores.
python3 - "$root"/lib/*.so* "$root"/lib/openmpi/*.so <<'PYTHON'
import struct, sys
PT_DYNAMIC, DT_RPATH, DT_RUNPATH, UNKNOWN = 2, 15, 29, 0x6000000d
for path in sys.argv[1:]:
    with open(path, "r+b") as file:
        header = file.read(64)
        (table,), (entry, count) = struct.unpack_from("<Q", header, 32), struct.unpack_from("<HH", header, 54)
        for k in range(count):
            file.seek(table + k * entry)
            kind, _, offset, _, _, size = struct.unpack("<IIQQQQ", file.read(40))
            for at in range(offset, offset + size if kind == PT_DYNAMIC else offset, 16):
                file.seek(at)
                if struct.unpack("<q", file.read(8))[0] in (DT_RPATH, DT_RUNPATH):
                    file.seek(at)
                    file.write(struct.pack("<q", UNKNOWN))
PYTHON
# The launcher is the system's, without RPATH: only it gets LD_LIBRARY_PATH.
for program in mpirun orted; do
    [ -e "$root/lib/$program" ] || continue
    cat >"$root/bin/$program" <<'SCRIPT'
#!/usr/bin/env bash
lib=$(cd "$(dirname "$0")/../lib" && pwd)
export LD_LIBRARY_PATH=$lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
exec "$lib/${0##*/}" "$@"
SCRIPT
    chmod +x "$root/bin/$program"
done

# The model to train, with its tokens, and a plan for one GPU of any kind.
printf '%s' '{"format": "hapt-cluster", "version": 1, "subclusters": [{"name": "gpu", "nodes": 1, "devices_per_node": 1, "device": "H100"}]}' \
    >"$root/inputs/one-gpu.json"
[ -e inputs/gpt.h5 ] || jobs/make-inputs.sh >/dev/null
cp inputs/gpt.h5 "$root/inputs/"
"$build/hapt" plan --input inputs/gpt.h5 --cluster "$root/inputs/one-gpu.json" --microbatches 8 --output "$root/inputs/plan.h5" >/dev/null

cat >"$root/run" <<'SCRIPT'
#!/usr/bin/env bash
# run hapt ARGUMENTS...    run mpirun -np 2 hapt ARGUMENTS...    run check [PATTERN] (the GPU checks; they append to results.jsonl)
here=$(cd "$(dirname "$0")" && pwd)
export PATH=$here/build:$here/bin:$PATH
export OMPI_MCA_mca_base_component_path=$here/lib/openmpi OPAL_LIBDIR=$here/lib OPAL_BINDIR=$here/bin
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
if [ "${1:-}" = check ]; then
    export HAPT_GPU_RESULTS=${HAPT_GPU_RESULTS:-$here/results.jsonl}
    exec "$here/tests/gpu/run" build/release "${@:2}"
fi
exec "$@"
SCRIPT
chmod +x "$root/run"
tar -C "$stage" --owner=0 --group=0 -czf "$output" hapt-gpu
bytes=$(stat -c %s "$output")
[ "$bytes" -le $most ] || fail "$output has $bytes bytes, more than $most" "build the plug-in for fewer kinds of GPU (CUDA_ARCHS)"
echo "$output: $((bytes >> 20)) MiB; unpack it there, then hapt-gpu/run check"
