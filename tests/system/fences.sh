#!/usr/bin/env bash
# Every command of README.md runs as it stands there, in order, in a copy of the repository (```sh blocks). HAPT_LONG=1: those of
# docs/commands.md and docs/slow-links.md as well, and the first two as an unprivileged user. The time to the first plan and to the first
# training step is printed.
# Runs beside others: it asserts no time.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1
own=$PWD
unset OMPI_ALLOW_RUN_AS_ROOT OMPI_ALLOW_RUN_AS_ROOT_CONFIRM

copy() { # FOLDER: what a clone has, and the built program
    mkdir -p "$1/build/release" "$1/outputs" && git ls-files -z README.md docs inputs jobs tools examples | tar --null -T - -c | tar -x -C "$1"
    cp -L "$HAPT" "$1/build/release/hapt" && ln -s release/hapt "$1/build/hapt"
}
# Shell blocks of a document, each preceded by a line "#: N" with the number of its first line.
blocks() { awk '/^```sh$/ {on = 1; print "#: " NR; next} /^```$/ {on = 0} on' "$1"; }
# runs DOCUMENT FOLDER [AS USER...]: stops at the first command that fails
runs() {
    local document=$1 folder=$2
    shift 2
    blocks "$document" | sed 's/^#: \(.*\)/echo "line \1" >\&3; date +"%s.%N \1" >>times/' >"$folder/commands"
    check "$document has commands" [ "$(grep -c . "$folder/commands")" -gt 2 ]
    (cd "$folder" && "$@" bash -e commands 3>line >said 2>error) || fail "$document ($*), block at $(tail -n 1 "$folder/line"): $(tail -n 3 "$folder/error")"
}
since() { awk -v a="$(sed -n "$2p" "$1" | cut -d' ' -f1)" -v b="$(sed -n "$3p" "$1" | cut -d' ' -f1)" 'BEGIN { printf "%.1f s", b - a }'; }

copy "$scratch/clone"
runs README.md "$scratch/clone"
date +%s.%N >>"$scratch/clone/times"
note "README.md: a plan of GPT-39B in $(since "$scratch/clone/times" 1 2), a small GPT planned and trained in $(since "$scratch/clone/times" 2 3)"
for document in docs/*.md README.md; do
    check "$document has no other indented commands" [ -z "$(grep -nE '^    (build/hapt|mpirun|jobs/)' "$document")" ]
done
if [ "${HAPT_LONG:-0}" != 0 ]; then
    copy "$scratch/commands"
    runs docs/commands.md "$scratch/commands"
    runs docs/slow-links.md "$scratch/clone"
    if [ "$(id -u)" -eq 0 ] && command -v runuser >/dev/null; then
        chmod 711 "$scratch"
        for document in README.md docs/commands.md; do
            copy "$scratch/nobody"
            chown -R nobody "$scratch/nobody"
            runs $document "$scratch/nobody" runuser -u nobody --
            rm -rf "$scratch/nobody"
        done
    fi
fi
cd "$own" && finish
