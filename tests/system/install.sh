#!/usr/bin/env bash
# Installation: into DESTDIR and into a PREFIX, what runs from there with an empty environment, what uninstalling leaves; the commit in
# --version; the packaging files (packaging/check.sh; with HAPT_LONG it builds the packages).
# Runs beside others: it measures no time.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1
place() { bash packaging/install.sh "$@" >"$scratch/out" 2>"$scratch/err"; code=$?; }
bare() { (cd "$scratch" && env -i "$@") >"$scratch/out" 2>"$scratch/err"; }
here=$scratch/own # a PREFIX that the files name
staged=$scratch/staged

# Into DESTDIR, with a umask that hides new files from other users.
umask 077
place install /opt/hapt "$staged" "$HAPT_BUILD"
umask 022
check "installing: $(cat "$scratch/err")" test $code -eq 0
root=$staged/opt/hapt
hidden=$(find "$root" \( -type d ! -perm -755 \) -o \( -type f ! -perm -644 \))
check "every user can read it: $hidden" test -z "$hidden"
for file in bin/hapt lib/pkgconfig/hapt.pc share/modulefiles/hapt/0.1.0 share/doc/hapt/README.md share/doc/hapt/tutorial.md \
    share/doc/hapt/LICENSE share/hapt/jobs/gpt39b.slurm share/hapt/jobs/heterogeneous-step.sh.inc share/hapt/python/hapt_tokens.py \
    share/hapt/inputs/two-subclusters.json share/hapt/inputs/clusters/a100x4-v100x4.json; do
    check "$file is there" test -s "$root/$file"
done
check "no header without a library" test ! -e "$root/include"
check "nothing names DESTDIR" test -z "$(grep -rIl "$staged" "$root")"
listed=$(sed -n 's/^file //p' "$root/share/hapt/manifest.txt" | sort)
check "the manifest lists all files" test "$listed" = "$(cd "$root" && find . -type f | cut -c2- | sort)"

# It runs from there. An installation may also be moved.
check "--version" bare "$root/bin/hapt" --version
check "--version says which commit: $(cat "$scratch/out")" grep -qxE 'hapt [0-9.]+ \((commit [0-9a-f]{8,}(-dirty)?|built outside git, no commit known)\)' "$scratch/out"
[ ! -e .git ] || check "the commit is known" grep -q '(commit ' "$scratch/out"
bare "$root/bin/hapt" doctor
check "doctor" test $? -eq 0
check "a model" bare "$root/bin/hapt" model gpt-39b --output gpt39b.h5
check "a plan of GPT-39B on paper: $(cat "$scratch/err")" bare "$root/bin/hapt" plan --input gpt39b.h5 \
    --cluster "$root/share/hapt/inputs/clusters/a100x4-v100x4.json" --objective formula --layers-per-model 24 --output plan.h5
check "... of 64 devices" grep -qE 'a100.*v100|v100' "$scratch/out"
if [ -e "$HAPT_BUILD/hapt-cuda.so" ]; then
    bare "$root/bin/hapt" doctor
    check "the installed plug-in is found" eval '! grep -q "this build has no CUDA back end" "$scratch/out"'
fi

# Uninstalling leaves what others have put there, and nothing else.
echo mine >"$root/share/hapt/inputs/mine.json"
place uninstall /opt/hapt "$staged"
check "uninstalling" test $code -eq 0
check "only another's file is left" test "$(cd "$staged" && find . -type f)" = ./opt/hapt/share/hapt/inputs/mine.json
rm "$root/share/hapt/inputs/mine.json"
place install /opt/hapt "$staged" "$HAPT_BUILD" && rm -f "$root/share/hapt/inputs/mine.json"
place uninstall /opt/hapt "$staged"
check "no file is left" test -z "$(find "$staged" -type f)"
place uninstall /opt/hapt "$staged"
check "nothing to remove is an error" test $code -eq 3
check "... with a hint" grep -q '^hint: ' "$scratch/err"

# Into a PREFIX that exists and is empty: it is as before afterwards. A stand-in for the program prints manual pages and a completion.
mkdir -p "$here" "$scratch/fake"
cat >"$scratch/fake/hapt" <<'SH'
#!/bin/sh
[ "$1 $2" = "help --as" ] || exit 2
case $3 in
man) printf '.\\" pages\n.TH HAPT 1 "2026"\n.SH NAME\nhapt \\- plans\n.TH HAPT-PLAN 1 "2026"\n.SH NAME\nhapt-plan \\- searches\n' ;;
bash) echo 'complete -W "plan train" hapt' ;;
esac
SH
chmod +x "$scratch/fake/hapt"
place install "$here/" "" "$scratch/fake"
check "installing into a PREFIX: $(cat "$scratch/err")" test $code -eq 0
check "a page for each command" test "$(cd "$here/share/man" && find . -type f | sort | tr '\n' ' ')" = "./man1/hapt-plan.1 ./man1/hapt.1 "
check "a page begins with its title" test "$(sed -n 2p "$here/share/man/man1/hapt-plan.1")" = '.TH HAPT-PLAN 1 "2026"'
check "pages are separate" eval '! grep -q HAPT-PLAN "$here/share/man/man1/hapt.1"'
check "a completion that bash takes" bash -n "$here/share/bash-completion/completions/hapt"
if command -v pkg-config >/dev/null; then
    folder=$(PKG_CONFIG_PATH=$here/lib/pkgconfig pkg-config --variable=pythondir hapt)
    check "pkg-config knows the Python folder: $folder" test -e "$folder/hapt_tokens.py"
    check "pkg-config knows the version" test "$(PKG_CONFIG_PATH=$here/lib/pkgconfig pkg-config --modversion hapt)" = 0.1.0
fi
if command -v tclsh >/dev/null; then
    cat >"$scratch/load.tcl" <<TCL
proc prepend-path {name value} { puts "\$name=\$value" }
proc module-whatis {text} { }
proc conflict {name} { }
source $here/share/modulefiles/hapt/0.1.0
TCL
    check "the module sets PATH" test "$(tclsh "$scratch/load.tcl" | sed -n 's/^PATH=//p')" = "$here/bin"
fi
place install "$here" "" "$scratch/fake"
check "installing again" test $code -eq 0
place uninstall "$here"
check "the PREFIX is empty again" test -z "$(ls -A "$here")"

# Refusals.
place install relative "" "$HAPT_BUILD"
check "a relative PREFIX is refused" test $code -eq 2
check "... with a hint" grep -q '^hint: ' "$scratch/err"
place install "$here" "" "$scratch/nowhere"
check "nothing built is an error" test $code -eq 3
check "... with a hint" grep -q '^hint: make\|^hint: run make' "$scratch/err"
if command -v make >/dev/null; then
    make -s -n -o all install PREFIX=/a DESTDIR=/b BUILD="$scratch/fake" >"$scratch/out" 2>&1
    check "make install passes PREFIX and DESTDIR" grep -qE "packaging/install.sh install '/a' '/b'" "$scratch/out"

    # Another commit compiles one file and links one program.
    mkdir "$scratch/build" && cp -a "$HAPT_BUILD"/{src,libhapt.a,solvers,commit} "$scratch/build/"
    build() { make CUDA=0 VARIANT="${HAPT_BUILD##*/}" BUILD="$scratch/build" HAPT_COMMIT="$1" "$scratch/build/hapt" >"$scratch/out" 2>&1; }
    check "a build: $(tail -n 3 "$scratch/out")" build 0123abcd
    check "another commit" build 89abcdef-dirty
    check "... compiles one file: $(cat "$scratch/out")" test "$(grep -c '^CC' "$scratch/out") $(grep '^CC' "$scratch/out")" = "1 CC   src/commit.c"
    check "... and makes no library" eval '! grep -q "^AR" "$scratch/out"'
    bare "$scratch/build/hapt" --version
    check "... which --version prints" grep -q '(commit 89abcdef-dirty)$' "$scratch/out"
fi

# The packaging files.
bash packaging/check.sh ${HAPT_LONG:+build} >"$scratch/out" 2>&1
check "packaging/check.sh: $(tail -n 5 "$scratch/out")" test $? -eq 0
finish
