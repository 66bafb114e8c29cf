#!/usr/bin/env bash
# Every example runs, and prints what its expected.txt says, in that order ("..." there stands for anything).
# Runs beside others: it asserts no time.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1
mkdir -p "$scratch/tests/data" && cp -r examples jobs inputs tools "$scratch" && cp -r tests/data/hf "$scratch/tests/data/hf"
unset OMPI_ALLOW_RUN_AS_ROOT OMPI_ALLOW_RUN_AS_ROOT_CONFIRM
for folder in "$scratch"/examples/*/; do
    name=$(basename "$folder")
    HAPT=$HAPT timeout 300 "$folder/run.sh" >"$scratch/out" 2>"$scratch/err"
    code=$?
    check "$name ends with code $code: $(tail -n 3 "$scratch/err")" [ $code -eq 0 ]
    /usr/bin/python3 - "$folder/expected.txt" "$scratch/out" <<'PYTHON' || fail "$name: see above"
import re, sys
lines = iter(open(sys.argv[2]).read().splitlines())
for expected in open(sys.argv[1]).read().splitlines():
    pattern = re.compile(".*".join(re.escape(part) for part in expected.rstrip().split("...")) + r"\s*$")
    if not any(pattern.match(line) for line in lines):
        sys.exit(f"not printed, or not in this place: {expected}")
PYTHON
done
check "examples/README.md lists all" [ "$(ls -d examples/*/ | wc -l)" -eq "$(grep -c '^| `' examples/README.md)" ]
finish
