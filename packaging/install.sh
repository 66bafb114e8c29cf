#!/usr/bin/env bash
# Installs what `make` built, or removes it again. Called by `make install` and `make uninstall`.
#   packaging/install.sh install PREFIX [DESTDIR [BUILD]]      BUILD: the folder with the program, default build/release
#   packaging/install.sh uninstall PREFIX [DESTDIR]
# Files lie in DESTDIR/PREFIX, and find each other under PREFIX:
#   bin/hapt                          the program; lib/hapt/hapt-cuda.so: the back end of GPUs, if it was built
#   share/hapt/                       jobs (for Slurm), inputs (cluster files), python (tools), manifest.txt
#   share/doc/hapt/, share/man/man1/, share/bash-completion/completions/hapt
#   lib/pkgconfig/hapt.pc             variables only: there is no library to link with, so no header is installed
#   share/modulefiles/hapt/VERSION    an environment module (Tcl)
# manifest.txt lists the files and the folders that this made. Uninstalling removes these and nothing else.
set -euo pipefail
cd "$(dirname "$0")/.."
usage() {
    sed -n '3,4s/^# *//p' packaging/install.sh >&2
    exit 2
}
[ $# -ge 2 ] || usage
action=$1 prefix=${2%/} destdir=${3:-} build=${4:-build/release}
[[ $prefix == /?* ]] || {
    echo "install: error: PREFIX must be an absolute path, not \"$2\"" >&2
    echo "hint: make install PREFIX=/usr/local" >&2
    exit 2
}
root=${destdir%/}$prefix
manifest=$root/share/hapt/manifest.txt
version=$(sed -n 's/^#define HAPT_VERSION "\(.*\)"$/\1/p' include/hapt/version.h)
files=() folders=()

# Makes a folder below the root, and notes what did not exist before.
folder() { # PATH below PREFIX, or nothing for PREFIX itself
    local path=$root${1:+/$1} missing=()
    while [ ! -d "$path" ]; do
        missing=("$path" "${missing[@]}")
        path=$(dirname "$path")
    done
    for path in "${missing[@]}"; do
        mkdir -m 755 "$path"
        case $path in "$root" | "$root"/*) folders+=("${path#"$root"}") ;; esac
    done
}
put() { # MODE SOURCE TARGET: a file at TARGET below PREFIX
    folder "$(dirname "$3")"
    install -m "$1" "$2" "$root/$3"
    files+=("/$3")
}
filled() { # TEMPLATE TARGET: a file with the prefix and the version
    local text
    text=$(<"$1")
    text=${text//@PREFIX@/"$prefix"}
    printf '%s\n' "${text//@VERSION@/"$version"}" >"$scratch/filled"
    put 644 "$scratch/filled" "$2"
}

remove() {
    [ -e "$manifest" ] || return 0
    cp "$manifest" "$scratch/manifest"
    local line path
    while IFS= read -r line; do
        if [[ $line == "file /"* ]]; then rm -f "$root${line#file }"; fi
    done <"$scratch/manifest"
    while IFS= read -r line; do # the deepest first; a folder in which others have put files stays
        path=$root${line#folder }
        if [[ $line == folder* && -d $path ]]; then rmdir --ignore-fail-on-non-empty "$path"; fi
    done < <(tac "$scratch/manifest")
}

# The program prints its manual pages one after another; each begins with .TH NAME SECTION.
put_pages() {
    local page
    mkdir "$scratch/man"
    awk -v folder="$scratch/man" '
        /^\.TH / { name = tolower($2); gsub(/"/, "", name); file = folder "/" name "." $3; printf "%s", before > file }
        file { print > file; next }
        { before = before $0 "\n" }' "$scratch/pages"
    for page in "$scratch"/man/*; do put 644 "$page" "share/man/man${page##*.}/${page##*/}"; done
}
put_texts() {
    filled packaging/hapt.pc.in lib/pkgconfig/hapt.pc
    filled packaging/modulefile.in "share/modulefiles/hapt/$version"
    # A program without these leaves them out.
    if "$build/hapt" help --as man >"$scratch/pages" 2>/dev/null; then put_pages; fi
    if "$build/hapt" help --as bash >"$scratch/completion" 2>/dev/null; then
        put 644 "$scratch/completion" share/bash-completion/completions/hapt
    fi
}
put_all() {
    local path
    folder ""
    put 755 "$build/hapt" bin/hapt
    [ ! -e "$build/hapt-cuda.so" ] || put 644 "$build/hapt-cuda.so" lib/hapt/hapt-cuda.so
    for path in gpt39b.slurm two-subclusters.slurm heterogeneous-step.sh.inc; do put 644 "jobs/$path" "share/hapt/jobs/$path"; done
    put 755 jobs/local.sh share/hapt/jobs/local.sh
    for path in inputs/*.json inputs/clusters/*.json; do put 644 "$path" "share/hapt/$path"; done
    for path in tools/*.py; do
        [ ! -e "$path" ] || put "$([ -x "$path" ] && echo 755 || echo 644)" "$path" "share/hapt/python/${path##*/}"
    done
    for path in README.md CHANGELOG.md LICENSE docs/*.md docs/*.svg; do
        [ ! -e "$path" ] || put 644 "$path" "share/doc/hapt/${path#docs/}"
    done
    put_texts
}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
case $action in
install)
    [ -x "$build/hapt" ] || {
        echo "install: error: there is no $build/hapt" >&2
        echo "hint: run make first" >&2
        exit 3
    }
    remove # an earlier version may have had other files
    put_all
    {
        for path in "${folders[@]}"; do echo "folder $path"; done
        for path in "${files[@]}" /share/hapt/manifest.txt; do echo "file $path"; done
    } >"$scratch/manifest"
    install -m 644 "$scratch/manifest" "$manifest"
    echo "installed hapt $version in $root"
    ;;
uninstall)
    [ -e "$manifest" ] || {
        echo "uninstall: error: $manifest does not exist: hapt is not installed there" >&2
        echo "hint: give the PREFIX and DESTDIR of make install" >&2
        exit 3
    }
    remove
    echo "removed hapt from $root"
    ;;
*) usage ;;
esac
