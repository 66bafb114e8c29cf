#!/usr/bin/env bash
# Symbolic links planted where the single-file commands write, and under temporary names: nothing outside is touched. See links.sh.
# Runs beside others
PART=files
. tests/system/links.sh
