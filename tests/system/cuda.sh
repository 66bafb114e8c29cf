#!/usr/bin/env bash
# The CUDA back end without a GPU: its sources run on this machine's cores (tests/gpu/host). The host cannot read device memory there, and
# every kernel is tested as on a GPU. Also the messages of hapt if something is missing.
# Runs beside others: it measures no time.
. tests/system/lib.sh.inc
host=$HAPT_BUILD/tests/gpu/hapt-cuda-host.so
[ -e "$host" ] || { echo "no $host"; exit 77; }
check() { # WHAT CONDITION...
    local what=$1
    shift
    checks=$((checks + 1))
    "$@" || fail "$what"
}
doctor() { "$HAPT" doctor 2>/dev/null | sed -n 's/^  cuda *//p'; }

# 1. The plug-in is missing, is not a library, or belongs to another build.
check "a missing plug-in" grep -q '^0 devices: HAPT_CUDA_PLUGIN names .*none.so' <(HAPT_CUDA_PLUGIN=$scratch/none.so doctor)
head -c 100000 "$host" >"$scratch/half.so"
check "half a plug-in" grep -q '^0 devices: .*half.so is no whole library' <(HAPT_CUDA_PLUGIN=$scratch/half.so doctor)
echo "no library" >"$scratch/text.so"
check "a plug-in that is not a library" grep -q '^0 devices: .*text.so' <(HAPT_CUDA_PLUGIN=$scratch/text.so doctor)
check "a library that is not a plug-in" grep -q '^0 devices: .*is of another build' <(HAPT_CUDA_PLUGIN=$HAPT_BUILD/tests/faults/faults.so doctor)
check "no device" grep -q '^0 devices: ' <(HAPT_CUDA_PLUGIN=$host HAPT_HOST_GPUS=0 doctor)
check "a GPU that the database does not have" grep -q '^  host-cuda .*1 x 1 .*Host-CUDA' <(HAPT_CUDA_PLUGIN=$host "$HAPT" topology)
check "two devices" grep -q '^2 devices, CUDA' <(HAPT_CUDA_PLUGIN=$host HAPT_HOST_GPUS=2 doctor)
# The real toolkit's plug-in loads. Whether there is a device depends on the machine.
if [ -e "$HAPT_BUILD/hapt-cuda.so" ]; then
    check "the plug-in loads" grep -Evq 'is of another build|undefined symbol|cannot open' <(HAPT_CUDA_PLUGIN=$HAPT_BUILD/hapt-cuda.so doctor)
fi

# A library that the plug-in needs is also found where pip installs it. If it is missing, doctor says how to get it, and fails.
: | cc -xc -shared -Wl,-soname,libcublasLt.so.99 -o "$scratch/blas" -
cc -shared -o "$scratch/plug.so" -Wl,--no-as-needed "$host" "$scratch/blas"
venv=$scratch/venv packages=lib/python3.12/site-packages/nvidia
mkdir -p "$venv/bin" "$scratch/bin" && cp /bin/true "$venv/bin/python3" && ln -s "$venv/bin/python3" "$scratch/bin/python3"
with() { # ENVIRONMENT...: the output of doctor
    env HAPT_CUDA_PLUGIN="$scratch/plug.so" "$@" "$HAPT" doctor 2>&1
}
comes_from() { # FOLDER ENVIRONMENT...
    local folder=$1
    shift
    mkdir -p "$folder" && cp "$scratch/blas" "$folder/libcublasLt.so.99"
    with "$@" >"$scratch/said"
    check "$*: $(cat "$scratch/said")" test "$(sed -n 's/^  libcublasLt.so.99 *//p' "$scratch/said" | xargs -r readlink -f)" = "$folder/libcublasLt.so.99"
    check "$*: a device" grep -q '^  cuda *1 device' "$scratch/said"
    rm "$folder/libcublasLt.so.99"
}
comes_from "$scratch/here" HAPT_CUDA_LIBRARIES="/nowhere:$scratch/here"
comes_from "$scratch/there" LD_LIBRARY_PATH="$scratch/there"
comes_from "$scratch/toolkit/lib64" CUDA_HOME="$scratch/toolkit"
comes_from "$venv/$packages/cu99/lib" VIRTUAL_ENV="$venv"
comes_from "$venv/$packages/cublas/lib" PATH="$venv/bin:$PATH"
comes_from "$venv/$packages/cu99/lib" PATH="$scratch/bin:$PATH"
comes_from "$venv/$packages/cu99/lib" HAPT_PYTHON="$venv/bin/python3"
comes_from "$scratch/site/nvidia/cublas/lib" PYTHONPATH="/nowhere:$scratch/site"
comes_from "$scratch/.local/$packages/cublas/lib" HOME="$scratch"
with HOME=/nowhere >"$scratch/said"
check "a missing library" test $? -eq 3
check "a missing library" grep -q '^  cuda *0 devices: libcublasLt.so.99 is found neither' "$scratch/said"
check "a missing library" grep -q 'do: python3 -m pip install nvidia-cublas,' "$scratch/said"
mkdir -p "$scratch/cut" && head -c 4000 "$scratch/blas" >"$scratch/cut/libcublasLt.so.99"
check "a truncated library" grep -q '^  libcublasLt.so.99 *missing' <(with HAPT_CUDA_LIBRARIES="$scratch/cut")

if command -v make >/dev/null; then
    mkdir "$scratch/none" && cp -a "$HAPT_BUILD"/{src,libhapt.a,solvers,commit} "$scratch/none/" && touch "$scratch/none/hapt-cuda.so"
    check "make CUDA=0" make -s CUDA=0 VARIANT="${HAPT_BUILD##*/}" BUILD="$scratch/none" "$scratch/none/hapt" >"$scratch/said" 2>&1
    check "make CUDA=0 leaves no earlier plug-in" test ! -e "$scratch/none/hapt-cuda.so"
    check "without the back end" grep -q '^0 devices: this build has no CUDA back end' <(HAPT=$scratch/none/hapt doctor)
fi

# 2. Constants of the host's cuDNN equal those of the real header, if it is installed.
header=$(ls "${CUDA_HOME:-/usr/local/cuda}"/include/cudnn.h /usr/include/cudnn.h /usr/include/*-linux-gnu/cudnn.h 2>/dev/null | head -n 1)
if [ -n "$header" ]; then
    toolkit=${CUDA_HOME:-/usr/local/cuda}/include
    { echo "#include \"$header\""; grep -o 'CUDNN_[A-Za-z0-9_]* = [0-9]*' tests/gpu/host/cudnn.h | sed 's/\(.*\) = \(.*\)/static_assert(\1 == \2, "");/'; } >"$scratch/values.cpp"
    check "constants of cuDNN" test "$(grep -c static_assert "$scratch/values.cpp")" -gt 80
    check "constants of cuDNN" c++ -fsyntax-only -I"$toolkit" "$scratch/values.cpp"
fi

# The real library, if installed, has plans for what the plug-in requests (77: it is not installed). Those of attention need a driver.
plans=$HAPT_BUILD/tests/gpu/plans
if [ -x "$plans" ]; then
    LD_LIBRARY_PATH=$HAPT_BUILD/tests/gpu/driver${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} "$plans" $([ "${HAPT_LONG:-0}" = 0 ] || echo whole) >"$scratch/said" 2>&1
    code=$?
    check "plans of the real cuDNN: $(tail -n 5 "$scratch/said")" test $code -eq 0 -o $code -eq 77
    [ $code -eq 77 ] || [ ! -e "$HAPT_BUILD/tests/gpu/driver/libcuda.so.1" ] ||
        check "plans for attention: $(cat "$scratch/said")" test "$(grep -c 'no driver' "$scratch/said")" -eq 0
fi

# 3. Convolutions that cuDNN lacks, refuses or fails to run (HAPT_HOST_CUDNN; tests/gpu/host/cudnn.cpp).
images() { # FAULT HAPT_CUDNN
    HAPT_CUDA_PLUGIN=$host HAPT_TEST_BACKEND=cuda HAPT_TEST_ONLY=convolutions_again HAPT_HOST_CUDNN=$1 HAPT_CUDNN=$2 "$HAPT_BUILD/tests/unit/kernels_images" 2>&1
}
check "doctor names cuDNN" grep -q 'cuDNN 9' <(HAPT_CUDA_PLUGIN=$host doctor)
check "doctor names a cuDNN that is not used" grep -vq 'cuDNN 9' <(HAPT_CUDNN=0 HAPT_CUDA_PLUGIN=$host doctor)
for fault in missing nothing refuses; do check "cuDNN: $fault" images $fault 1 >"$scratch/said"; done
check "a convolution that cuDNN fails at" grep -q 'cuDNN: a convolution: CUDNN_STATUS_EXECUTION_FAILED' <(images breaks 1)
check "HAPT_CUDNN=0" images breaks 0 >"$scratch/said"

# 4. The host CUDA itself, every kernel, and training (HAPT_LONG=1: of every family).
checks=$((checks + 1))
"$HAPT_BUILD/tests/gpu/selftest" >"$scratch/said" 2>&1 || fail "$(tail -n 20 "$scratch/said")"
export HAPT_CUDA_PLUGIN=$host HAPT_HOST_GPUS=2
[ "${HAPT_LONG:-0}" != 0 ] || export HAPT_TEST_QUICK=1
checks=$((checks + 1))
# gpu_bundle runs the part `profiles`
[ "${HAPT_LONG:-0}" != 0 ] && parts= || parts='^(doctor|kernels|benchmark|operators|groups|training|collectives)'
tests/gpu/run "${HAPT_BUILD#"$PWD"/}" "$parts" >"$scratch/said" 2>&1 || fail "$(cat "$scratch/said")"
figures=$(tail -n 1 "$scratch/said")
finish
