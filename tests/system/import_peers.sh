#!/usr/bin/env bash
# Imported and exported models against transformers and PEFT themselves (import_peers.py): random shapes of every family. Needs a Python
# with torch 2, transformers 5 and peft in HAPT_TRANSFORMERS; else it is skipped. HAPT_LONG: five models of each family instead of one.
# Runs beside others: it measures no time.
set -u
python=${HAPT_TRANSFORMERS:-}
[ -n "$python" ] || { echo "skipped: HAPT_TRANSFORMERS names no Python with transformers"; exit 77; }
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false exec "$python" tests/system/import_peers.py "$HAPT" "$dir"
