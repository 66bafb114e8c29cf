#!/usr/bin/env bash
# `hapt data` and `hapt model` as users run them: files, figures, exit codes, one error line and a hint.
# Runs beside others: it measures no time.
set -u
hapt=$(realpath "${HAPT:-build/hapt}")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder" || exit 1
checks=0 failures=0

check() { # WHAT CONDITION...
    local what=$1
    shift
    checks=$((checks + 1))
    "$@" || { failures=$((failures + 1)); echo "failed: $what: $*"; }
}
refuses() { # CODE ARGUMENTS...
    local code=$1
    shift
    "$hapt" "$@" >out 2>err
    check "exit code of hapt $*" [ $? -eq "$code" ]
    check "one error line of hapt $*" [ "$(grep -c 'error:' err)" -eq 1 ]
    check "a hint from hapt $*" grep -q '^hint: ' err
}
field() { # NAME: a number of the JSON object in `out`
    sed -n "s/.*\"$1\": *\([-0-9.e]*\).*/\1/p" out
}
near() { awk -v a="$1" -v b="$2" -v t="$3" 'BEGIN { exit !(a - b <= t && b - a <= t && a != "") }'; }

# Bytes: entropies compared with those by awk.
printf 'In the beginning God created the heaven and the earth.\nAnd the earth was without form.\n' >text
"$hapt" data text --output deep/er/tokens.h5 --json >out 2>err
check 'data exits with 0' [ $? -eq 0 ]
check 'count' [ "$(field tokens)" = "$(wc -c <text)" ]
check 'vocabulary' [ "$(field vocab)" = 256 ]
expected=$(od -An -v -tu1 -w1 text | awk '
    { n++; one[$1]++; if (n > 1) { two[last, $1]++; before[last]++ } last = $1 }
    END {
        for (a in one) unigram -= one[a] / n * log(one[a] / n)
        for (k in two) { split(k, p, SUBSEP); bigram -= two[k] / (n - 1) * log(two[k] / before[p[1]]) }
        printf "%.9f %.9f\n", unigram, bigram
    }')
check 'unigram entropy' near "$(field unigram_entropy)" "${expected% *}" 1e-6
check 'bigram entropy' near "$(field bigram_entropy)" "${expected#* }" 1e-6

# 16-bit tokens as nanoGPT writes them, and behind llm.c's header (256 numbers: magic 20240520 = 0x134D888, version 1, count 3).
printf '\x05\x00\x2c\x01\x05\x00' >nano.bin
{
    printf '\x88\xd8\x34\x01\x01\x00\x00\x00\x03\x00\x00\x00'
    head -c $((4 * 253)) /dev/zero
    cat nano.bin
} >llmc.bin
"$hapt" data nano.bin --type uint16 --output nano.h5 --json >out 2>err
check 'nanoGPT tokens' [ "$(field tokens) $(field vocab)" = '3 301' ]
"$hapt" data llmc.bin --output llmc.h5 --json >out 2>err
check 'llm.c tokens' [ "$(field tokens) $(field vocab)" = '3 301' ]
if command -v h5dump >/dev/null; then
    for file in nano llmc; do
        check "tokens of $file" [ "$(h5dump -y -d /tokens $file.h5 | grep -c '5, 300, 5')" -eq 1 ]
    done
fi

# CIFAR-10's records: a label, then 3 x 1024 bytes. Labels 3, 9 and 0; red 10 and 30 in turn, green 7, blue 0 (all of image 2: 255).
record() { # LABEL RED GREEN BLUE, as octal
    printf "\\$1"
    for value in $2 $3 $4; do head -c 1024 /dev/zero | tr '\0' "\\$value"; done
}
{ record 003 012 007 000 && record 011 036 007 000; } >data_batch_1.bin
record 000 377 377 377 >data_batch_2.bin
"$hapt" data data_batch_1.bin data_batch_2.bin --type cifar10 --output images.h5 --json >out 2>err
check 'cifar10 exits with 0' [ $? -eq 0 ]
check 'images' [ "$(field images) $(field classes)" = '3 10' ]
if command -v h5dump >/dev/null; then
    check 'labels' [ "$(h5dump -y -d /labels images.h5 | grep -c '3, 9, 0')" -eq 1 ]
    check 'a red pixel' [ "$(h5dump -y -d /images -s 1,0,31,31 -c 1,1,1,1 images.h5 | grep -c ' 30$')" -eq 1 ]
    check 'a blue pixel' [ "$(h5dump -y -d /images -s 2,2,0,0 -c 1,1,1,1 images.h5 | grep -c ' 255$')" -eq 1 ]
    mean=$(h5dump -y -m %.9f -d /mean images.h5 | sed -n 's/^ *\([0-9.]*\),$/\1/p' | head -n 1)
    check 'mean of red' near "$mean" 98.333333 1e-4
    deviation=$(h5dump -y -m %.9f -d /std images.h5 | sed -n 's/^ *\([0-9.]*\),$/\1/p' | head -n 1)
    check 'deviation of red' near "$deviation" 111.0805511 1e-4
fi
"$hapt" model vgg --image 32 --classes 10 --width 4 --hidden 8 --data images.h5 --output v.h5 --json >out 2>err
check 'a model carries images' [ $? -eq 0 ]
refuses 3 model vgg --image 16 --classes 10 --width 4 --hidden 8 --data images.h5 --output v.h5
refuses 3 model vgg --image 32 --classes 9 --width 4 --hidden 8 --data images.h5 --output v.h5
head -c 3000 data_batch_1.bin >cut.bin
refuses 3 data cut.bin --type cifar10 --output t.h5
record 012 000 000 000 >label.bin
refuses 3 data data_batch_1.bin label.bin --type cifar10 --output t.h5
"$hapt" data data_batch_1.bin data_batch_2.bin --output t.h5 --json >out 2>err
check 'CIFAR-10 is recognised' [ "$(field images) $(field classes)" = '3 10' ]
refuses 2 data --type cifar10 --output t.h5

model=(model gpt --layers 1 --hidden 8 --heads 2 --sequence 4 --vocab 301 --microbatch 1)
"$hapt" "${model[@]}" --data nano.h5 --steps 7 --output m.h5 --json >out 2>err
check 'model exits with 0' [ $? -eq 0 ]
check 'parameters' [ "$(field parameters)" -eq $((12 * 64 + 13 * 8 + 301 * 8 + 4 * 8 + 16)) ]
check 'silence on standard error' [ ! -s err ]
"$hapt" help model >out 2>err
check 'the model file is described' grep -q '/operators/input' out
"$hapt" help data >out 2>err
check 'the data file is described' grep -q '20240520' out

cp m.h5 old.h5
refuses 2 model gpt --layers 2
refuses 2 model --output m.h5
refuses 2 model gtp --output m.h5
refuses 2 model gpt --hidden 10 --heads 4 --output m.h5
refuses 2 model gpt --hiden 16 --output m.h5
refuses 2 model gpt --layers 0 --output m.h5
refuses 2 model gpt --dtype fp64 --output m.h5
refuses 3 "${model[@]}" --weights none.h5 --output m.h5
refuses 3 "${model[@]}" --weights nano.h5 --output m.h5
refuses 3 model gpt --layers 1 --hidden 8 --heads 2 --sequence 4 --vocab 300 --data nano.h5 --output m.h5
refuses 6 "${model[@]}" --output /proc/none/m.h5
check 'failures leave the old file alone' cmp -s m.h5 old.h5
check 'and nothing beside it' [ -z "$(find . -name '*.tmp')" ]
refuses 2 data --output t.h5
refuses 2 data text
refuses 3 data none.txt --output t.h5
refuses 3 data . --output t.h5
printf 'abc' >odd
refuses 3 data odd --type uint16 --output t.h5
refuses 3 data text --type llmc --output t.h5
head -c 1028 llmc.bin >short.bin
refuses 3 data short.bin --output t.h5
: >empty
refuses 3 data empty --output t.h5

# The named models of the other families have their published sizes, in the help as well.
while read -r name parameters; do
    "$hapt" model "$name" --output named.h5 --json >out 2>err
    check "$name exits with 0" [ $? -eq 0 ]
    check "parameters of $name" [ "$(field parameters)" = "$parameters" ]
    check "$name in the help" grep -q "^  $name  *$parameters parameters" <("$hapt" help model)
done <<EOF
llama-2-7b 6738415616
llama-3-8b 8030261248
vit-base 86567656
EOF

# Named models: they are as the help says, given options override them, and they have the paper's sizes (HAPT section 6).
"$hapt" help model >help
names=$(sed -n 's/^  \(gpt[-0-9a-z]*\)  *\([0-9]*\) parameters.*/\1:\2/p' help)
check 'named models are listed' [ "$(wc -w <<<"$names")" -eq 4 ]
for pair in $names; do
    name=${pair%:*}
    "$hapt" model "$name" --output named.h5 --json >out 2>err
    check "$name exits with 0" [ $? -eq 0 ]
    check "parameters of $name" [ "$(field parameters)" = "${pair#*:}" ]
    check "family of $name" grep -q '"family": "gpt"' out
    layers=$(sed -n 's/.*"layers": "\([0-9]*\)".*/\1/p' out) hidden=$(sed -n 's/.*"hidden": "\([0-9]*\)".*/\1/p' out)
    check "$name by formula" [ "$(field parameters)" -eq $((layers * (12 * hidden * hidden + 13 * hidden) + (50257 + 1024 + 2) * hidden)) ]
    billions=${name#gpt-}
    case $name in gpt-*b) check "$name is of its size" near "$(field parameters)" "${billions%b}e9" 0.5e9 ;; esac
    case $name in
    gpt-*b)
        check "$name trains in bf16" grep -q '"dtype": "bf16"' out
        check "rows of $name" grep -q '"microbatch": "8"' out
        check "$name notes 128 microbatches" grep -q '128' <(h5dump -d /training/value named.h5)
        ;;
    esac
done
"$hapt" model gpt-39b --layers 1 --hidden 16 --heads 2 --dtype fp32 --microbatches 4 --output given.h5 --json >out 2>err
check 'given options rule' grep -q '"layers": "1".*"hidden": "16".*"heads": "2".*"microbatch": "8".*"dtype": "fp32"' out
check 'a given training option rules' [ "$(h5dump -y -w 80 -d /training/value given.h5 | grep -c '"4"')" -eq 1 ]
check 'and stands once' [ "$(h5dump -y -d /training/option given.h5 | grep -c microbatches)" -eq 1 ]
# Families of images: torchvision's sizes.
images=0
for pair in $(sed -n 's/^  \(\(vgg\|resnet\)[-0-9a-z]*\)  *\([0-9]*\) parameters.*/\1:\3/p' help); do
    "$hapt" model "${pair%:*}" --output named.h5 --json >out 2>err
    check "parameters of ${pair%:*}" [ "$(field parameters)" = "${pair#*:}" ]
    images=$((images + 1))
done
check 'three named models of images' [ "${images:-0}" -eq 3 ]
"$hapt" model vgg19 --output named.h5 --json >out
check 'torchvision vgg19' [ "$(field parameters)" = 143667240 ]
# 19.63 G multiplications per image (the published figure), 4 rows, forward and twice backward except the first layer's dx.
check 'FLOPs of vgg19' near "$(field flops_per_microbatch)" 471e9 2e9
"$hapt" model resnet50 --output named.h5 --json >out
check 'torchvision resnet50' [ "$(field parameters)" = 25557032 ]
refuses 2 model vgg --image 16 --stages 5 --output m.h5
refuses 2 model vgg --stages 2,,2 --output m.h5
refuses 2 model resnet --stages 0 --output m.h5
refuses 2 model resnet --stages 9 --output m.h5
refuses 2 model resnet --stages x --output m.h5
refuses 3 model resnet --image 32 --data nano.h5 --output m.h5
refuses 2 model gpt-40b --output m.h5
refuses 2 model gpt-39b --heads 60 --output m.h5

echo "$checks checks, $failures failed"
[ $failures -eq 0 ]
