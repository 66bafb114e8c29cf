#!/usr/bin/env bash
# A short round of the fuzzer (tests/fuzz): readers and commands of hapt read damaged files of every kind. The inputs are always the same.
# `make fuzz` is the campaign with sanitizers.
# Runs beside others: it measures no time.
cd "$(dirname "$0")/../.." || exit 1
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
inputs=300
[ "${HAPT_LONG:-0}" != 0 ] && inputs=20000
OMP_NUM_THREADS=1 "$HAPT_BUILD/tests/fuzz/fuzz" --inputs $inputs --seed 1 --jobs 2 --keep "$scratch" tests/fuzz/corpus
