#!/usr/bin/env bash
# Symbolic links under every name that a run writes or removes. Nothing outside its folder changes, and the run reports the error or
# continues. HAPT_LONG=1: every name, every kind of link, every way of starting; else a sample. HAPT_SEED repeats one.
# PART=files: links under the names that single-file commands write, and under temporary names (links_files.sh).
# Runs beside others
. tests/system/lib.sh.inc
passes 1 data tests/system/lib.sh.inc --output "$scratch/t.h5" || finish
passes 1 model gpt --layers 1 --hidden 16 --heads 2 --sequence 8 --vocab 256 --microbatch 2 --output "$scratch/m.h5" || finish
plans_of_one_and_two
checks=$((checks + 1))
/usr/bin/python3 tests/system/links.py "$HAPT" "$scratch" "${PART:-run}" >"$scratch/said" 2>&1 || fail "$(cat "$scratch/said")"
figures=$(tail -n 1 "$scratch/said")
finish
