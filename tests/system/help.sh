#!/usr/bin/env bash
# Help: widths, lengths, every option of the table, explanations, suggestions, manual pages, completion.
# Runs beside others: it measures no time.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1

commands=$("$HAPT" --help | sed -n 's/^  hapt \([a-z]*\) .*/\1/p')
check "commands: $(echo $commands)" [ "$(wc -w <<<"$commands")" -ge 16 ]
for command in job $commands; do
    [ $command = job ] && word= || word=$command
    "$HAPT" $word --help >"$scratch/short" 2>"$scratch/err"
    check "hapt $word --help: code $?" [ $? -eq 0 ]
    check "hapt $word --help: $(wc -l <"$scratch/short") lines" [ "$(wc -l <"$scratch/short")" -le 60 ]
    "$HAPT" help $command >"$scratch/$command.all" 2>"$scratch/err"
    check "hapt help $command" [ $? -eq 0 ]
    wide=$(awk 'length > 90' "$scratch/short" "$scratch/$command.all")
    check "wider than 90 columns: $wide" [ -z "$wide" ]
    check "trailing spaces" [ -z "$(grep ' $' "$scratch/short" "$scratch/$command.all")" ]
    "$HAPT" $word --help all >"$scratch/all" 2>&1
    check "--help all of hapt $word" cmp -s "$scratch/all" "$scratch/$command.all"
    "$HAPT" help $command --as man >"$scratch/$command.1" 2>&1
    check "the manual page of $command" grep -q '^\.SH OPTIONS' "$scratch/$command.1"
    if command -v groff >/dev/null; then
        groff -man -Tascii -ww "$scratch/$command.1" >"$scratch/page" 2>"$scratch/groff"
        check "groff warns of $command: $(head -3 "$scratch/groff")" [ ! -s "$scratch/groff" ]
        check "the page shows its name" grep -q "^ *hapt.* - " "$scratch/page"
    fi
done

# The table itself, read by another parser: each option stands in the help of the commands that take it, and of no others.
/usr/bin/python3 - src/base/options.def "$scratch" >"$scratch/out" <<'PYTHON'
import re, sys
text = open(sys.argv[1]).read()
letter = dict(job="j", topology="t", profile="f", plan="p", spmd="h", simulate="s", train="r", evaluate="v", generate="g",
              model="m", data="d", export="e", report="o", check="c", doctor="D", help="H", ops="O")
letter["import"] = "i"
rows = re.findall(r'^OPTION\("([^"]+)", (\w+), (?:NONE|"[^"]*"), (?:ANY|[^,]+, [^,]+), (?:NONE|"[^"]*"), "(\w+)", "(\w*)", [01],'
                  r'\s*"((?:[^"\\]|\\.)*)"', text, re.M)
assert len(rows) == len(re.findall(r"^OPTION\(", text, re.M)) > 130
for command, code in letter.items():
    printed = re.findall(r"^  --([a-z0-9-]+)", open(f"{sys.argv[2]}/{command}.all").read(), re.M)
    expected = [name.replace("microbatch", "microbatch-rows") if name == "microbatch" else name for name, _, letters, _, _ in rows if code in letters]
    if printed != expected:
        print(command, set(printed) ^ set(expected))
for name, kind, letters, short, brief in rows:
    if not set(short) <= set(letters): print(name, "short help of commands that do not take it")
    if len(brief) > 60: print(name, "brief text of", len(brief))
    if brief.endswith("."): print(name, "ends with a period")
PYTHON
check "the table and the help: $(cat "$scratch/out")" [ ! -s "$scratch/out" ]

# One option; suggestions; old and new names.
for name in steps --steps; do
    "$HAPT" help $name >"$scratch/out"
    check "an option is explained" grep -q '^  --steps N .*\[100\]$' "$scratch/out"
    check "with its commands" grep -q 'commands: hapt, hapt train' "$scratch/out"
done
refuses 2 'no command or option "stepz"' 1 help stepz
check "a near option" grep -q '^hint: did you mean hapt help steps?$' "$scratch/err"
refuses 2 'no command or option "plna"' 1 help plna
check "a near command" grep -q '^hint: did you mean hapt help plan?$' "$scratch/err"
refuses 2 'no command or option "xyzzyx"' 1 help xyzzyx
refuses 2 'unknown command "trian"' 1 trian
check "a near command word" grep -q '^hint: did you mean hapt train?$' "$scratch/err"
refuses 2 'unknown model family "gpt2-125m"' 1 model gpt2-125m --output "$scratch/none.h5"
check "a near named model" grep -q '^hint: did you mean hapt model gpt2-124m?$' "$scratch/err"
refuses 2 'unknown option --stpes of hapt train' 1 train --stpes 3
check "a near option of the command" grep -q '^hint: did you mean --steps?$' "$scratch/err"
refuses 2 'unknown option --steps of hapt plan' 1 plan --steps 3
check "the commands of an option" grep -q '^hint: hapt help steps ' "$scratch/err"
refuses 2 'too many words' 1 help plan train
refuses 2 'no effect' 1 help plan --as bash
refuses 2 'bad value "maybe" of --help' 1 plan --help maybe
refuses 2 'bad value "0" of --microbatch-rows' 1 model gpt --microbatch-rows 0
for name in microbatch microbatch-rows; do
    passes 1 model gpt --layers 2 --hidden 32 --heads 2 --sequence 16 --vocab 64 --$name 3 --output "$scratch/$name.h5"
done
check "both names of an option write the same file" h5diff "$scratch/microbatch.h5" "$scratch/microbatch-rows.h5"
refuses 2 'given twice' 1 model gpt --microbatch 3 --microbatch-rows 3 --output "$scratch/no.h5"
check "-v is --version" [ "$("$HAPT" -v)" = "$("$HAPT" --version)" ]
check "-h is --help" cmp -s <("$HAPT" -h) <("$HAPT" --help)

# Completion in a real shell.
"$HAPT" help --as bash >"$scratch/completion"
complete_of() { # WORDS...: the last one is completed
    bash -c '. "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _hapt; printf "%s\n" "${COMPREPLY[@]}"' "$scratch/completion" "$@"
}
check "commands" [ "$(complete_of hapt pl)" = plan ]
check "options of a command" [ "$(complete_of hapt plan --what | sort | tr '\n' ' ')" = "--what-if " ]
check "options of the job" [ "$(complete_of hapt --max-h)" = --max-hours ]
check "no options of other commands" [ -z "$(complete_of hapt report --max-h)" ]
check "choices" [ "$(complete_of hapt plan --objective f)" = formula ]
check "models: $(complete_of hapt model gpt)" [ "$(complete_of hapt model gpt-3 | tr '\n' ' ')" = "gpt-30b gpt-39b " ]
check "the word of cluster" [ "$(complete_of hapt cluster i)" = init ]
check "files" [ "$(complete_of hapt plan --input "$scratch/microbatch-r")" = "$scratch/microbatch-rows.h5" ]
finish
