#!/usr/bin/env bash
# Runs the main job on this machine: four CPU ranks as two unlike subclusters joined by a paced link.
set -eu
cd "$(dirname "$0")/.."
exec jobs/local.sh -np 4 build/hapt --input inputs/gpt.h5 --cluster inputs/two-subclusters.json "$@"
