#!/usr/bin/env bash
# docs/tutorial.md as a new user runs it: its cluster, its four commands, and those of README.md. Transformers makes a small model and a tokenizer
# (HAPT_TRANSFORMERS, a Python with it; else it is skipped). The validation loss falls, and transformers loads what comes out.
# Runs beside others: it asserts no time.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1
python=${HAPT_TRANSFORMERS:-}
[ -n "$python" ] || { echo "skipped: HAPT_TRANSFORMERS names no Python with transformers"; exit 77; }
own=$PWD
mkdir -p "$scratch"/{texts,build} && cp -r docs jobs tools "$scratch" && ln -s "$HAPT" "$scratch/build/hapt"
# blocks LANGUAGE: the blocks of that language in the tutorial, without their indentation
blocks() { awk -v l="\`\`\`$1" '$1 == l {on = 1; next} $1 == "```" {on = 0} on' "$scratch/docs/tutorial.md" | sed 's/^   //'; }
blocks json >"$scratch/lab.json"
blocks sh >"$scratch/commands"
check "four commands" test "$(grep -vc '^ ' "$scratch/commands")" -eq 4
for source in src/*/*.c; do cp "$source" "$scratch/texts/${source//\//-}"; done
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
cd "$scratch" || exit 1
"$python" "$own/tests/system/tutorial.py" make >"$scratch/said" 2>&1 || fail "a model: $(cat "$scratch/said")"
(PATH=$(dirname "$python"):$PATH bash -e "$scratch/commands") >"$scratch/said" 2>&1 || fail "the commands: $(tail -n 5 "$scratch/said")"
"$python" "$own/tests/system/tutorial.py" check >"$scratch/said" 2>&1 || fail "the result: $(tail -n 5 "$scratch/said")"
figures=$(tail -n 1 "$scratch/said")
blocks bash >"$scratch/words"
(PATH=$(dirname "$python"):$PATH bash -e "$scratch/words") >"$scratch/text" 2>"$scratch/said" || fail "hapt generate: $(tail -n 5 "$scratch/said")"
check "transformers continues the text so, too: $(cat "$scratch/text")" "$python" "$own/tests/system/tutorial.py" text <"$scratch/text"
evaluate=$(grep -o '`build/hapt evaluate [^`]*`' docs/tutorial.md | tr -d '`')
check "hapt evaluate: $evaluate" mpirun --oversubscribe --bind-to none -np 3 $evaluate --threads 1
"$python" "$own/tests/system/tutorial.py" chat "$scratch/tools/hapt_tokens.py" "$HAPT" >"$scratch/said" 2>&1 || fail "chats: $(tail -n 5 "$scratch/said")"

# README.md has four such commands as well.
mkdir -p "$scratch/readme/build" && cp -r "$own"/{jobs,tools} model texts "$scratch/readme" && ln -s "$HAPT" "$scratch/readme/build/hapt"
awk '/^```published$/ {on = 1; next} /^```$/ {on = 0} on' "$own/README.md" >"$scratch/readme/commands"
check "README.md has four commands" test "$(grep -c . "$scratch/readme/commands")" -eq 4
(cd "$scratch/readme" && PATH=$(dirname "$python"):$PATH bash -e commands) >"$scratch/said" 2>&1 || fail "README's commands: $(tail -n 5 "$scratch/said")"
check "transformers loads what they exported" "$python" -c 'import sys, transformers; transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])' "$scratch/readme/tuned"

check "hapt report" build/hapt report --input outputs/model/run.h5
check "hapt plan --explain" build/hapt plan --input model.h5 --cluster lab.json --predict --explain
finish
