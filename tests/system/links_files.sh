#!/usr/bin/env bash
# Symbolic links where the single-file commands write, and under temporary names: nothing outside changes. See links.sh.
# Runs beside others
PART=files
. tests/system/links.sh
