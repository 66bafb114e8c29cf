#!/usr/bin/env bash
# Published models in and out: folders of transformers 5.23 (tests/data/hf) are imported, trained on 1 to 4 ranks and exported again
# (import.py). HAPT_LONG: every family on every number of ranks.
# Runs beside others: it measures no time.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
exec /usr/bin/python3 tests/system/import.py "$HAPT" "$dir"
