#!/usr/bin/env bash
# The scripts of jobs/ that no other test runs, in small: inputs and the main job on this machine; the Slurm jobs under an srun that is mpirun
# (gpt39b: that says what it was asked); the case study. job_step, slurm, build and gpu_bundle test the others.
# Runs beside others: it measures no time.
. tests/system/lib.sh.inc
own_tree
job() { # COMMAND...: in the tree
    (cd "$tree" && PATH=$stand_ins:$PATH timeout 240 "$@") >"$scratch/out" 2>"$scratch/err"
    code=$?
}
ends() { # WHAT CODE
    check "$1: exit code $code, not $2: $(tail -n 5 "$scratch/out" "$scratch/err")" test $code -eq "$2"
}
says() { # WHAT PATTERN [FILE]
    check "$1: no /$2/ in: $(tail -n 20 "$scratch/${3:-out}")" grep -qE -- "$2" "$scratch/${3:-out}"
}

# jobs/make-inputs.sh: without the text one error line; else a model with its data, made once.
mv "$stand_ins/bible" "$scratch/bible"
if ! command -v bible >/dev/null; then
    job jobs/make-inputs.sh
    ends "no text" 3
    says "no text" '^make-inputs: error: ' err
    says "no text" '^hint: ' err
fi
mv "$scratch/bible" "$stand_ins/bible"
job jobs/make-inputs.sh
ends make-inputs 0
check "no label of a verse is in the data" test "$(h5dump -d /tokens -c 4 "$tree/inputs/tokens.h5" | grep -c '71, 101, 49, 58')" -eq 0
job jobs/make-inputs.sh
ends "make-inputs again" 0
says "make-inputs again" 'is up to date'

# jobs/run-local.sh: the main job; what follows are options of hapt.
job jobs/run-local.sh --steps 1 --microbatches 4 --profile-seconds 1 --threads 1
ends run-local 0
says run-local 'loss'
check "run-local leaves a run file" test -s "$tree/outputs/gpt/run.h5"

# The Slurm jobs.
cat >"$stand_ins/srun" <<'SH'
#!/bin/bash
echo srun "$@"
while [[ $1 = --* ]]; do shift; done
[ -z "${SRUN_CODE:-}" ] || exit "$SRUN_CODE"
exec mpirun --oversubscribe --bind-to none -np 4 "$@"
SH
printf '#!/bin/sh\necho scontrol "$@"\n' >"$stand_ins/scontrol"
printf '#!/bin/sh\necho 7+0.batch\necho 7+0.0\n' >"$stand_ins/squeue"
printf '#!/bin/sh\nexec /bin/sleep 0.1\n' >"$stand_ins/sleep"
chmod +x "$stand_ins"/*
passes 1 model gpt --layers 2 --hidden 32 --heads 2 --sequence 32 --vocab 256 --microbatch 2 --data "$tree/inputs/tokens.h5" --microbatches 4 --steps 3 \
    --output "$tree/inputs/small.h5"
two() { job env SLURM_JOB_ID=7 POLL_S=1 CLUSTER=inputs/two-subclusters.json "$@" bash jobs/two-subclusters.slurm inputs/small.h5 --profile-seconds 1 --threads 1; }
two
ends two-subclusters 0
says two-subclusters '^srun --het-group=0,1 --mpi=pmix '
check "two-subclusters leaves a checkpoint" compgen -G "$tree/outputs/small/checkpoints/step-*/manifest.h5" >/dev/null
check "two-subclusters is not queued again" test "$(grep -c '^scontrol' "$scratch/out")" -eq 0
two
ends "two-subclusters, with nothing to do" 0
# With a model the devices are found; without one, CPUs stand for two kinds.
job env SLURM_JOB_ID=7 POLL_S=1 SRUN_CODE=0 bash jobs/two-subclusters.slurm inputs/small.h5
says "two-subclusters finds the devices" '^srun .* --input inputs/small.h5 --output outputs/small '
job env SLURM_JOB_ID=7 POLL_S=1 SRUN_CODE=0 bash jobs/two-subclusters.slurm
says "two-subclusters without a model" '^srun .* --input inputs/gpt.h5 --cluster ./inputs/two-hosts.json '
two SRUN_CODE=9
ends "two-subclusters that was stopped" 0
says "two-subclusters that was stopped" '^scontrol requeue 7$'

# GPT-39B: every option exists in the command that it is given to; model, tokens and plan are made, and once made are kept.
sed -e ':a' -e '/\\$/{N' -e 's/\\\n//' -e 'ba' -e '}' jobs/gpt39b.slurm | grep -v '^#' | grep '"\$hapt" ' | grep -v '^if ' | while read -r line; do
    words=${line#*\"\$hapt\" }
    echo "${words%% *}" >>"$scratch/commands"
    word=${words%% *}
    case $word in -*) word= ;; esac
    "$HAPT" help ${word:-job} >"$scratch/help" 2>&1
    for option in $(grep -o -e '--[a-z][a-z0-9-]*' <<<"$words"); do
        grep -q -e "^  $option " "$scratch/help" || echo "hapt $word lacks $option"
    done
done >"$scratch/lacking"
check "commands of gpt39b" test "$(LC_ALL=C sort "$scratch/commands" | tr '\n' ' ')" = "--input data model plan train "
check "options of gpt39b: $(tr '\n' ';' <"$scratch/lacking")" test ! -s "$scratch/lacking"
# A smaller model and cluster; HAPT_LONG=1: the script's own, whose plan takes longer than all other scripts.
four_gpus
own=(MODEL=gpt2-124m CLUSTER="$scratch/gpus.json")
[ -z "${HAPT_LONG:-}" ] || own=()
gpt39b() { job env SLURM_JOB_ID=7 SLURM_NTASKS=64 SRUN_CODE="$1" "${own[@]}" "${@:2}" bash jobs/gpt39b.slurm ${data:-}; }
data=
gpt39b 0
ends "gpt39b without data" 0
says "gpt39b without data rehearses" '^srun --het-group=0,1 --mpi=pmix .* train .*--plan outputs/gpt39b/plan.h5 --device emulated '
says "gpt39b without data says which to give" 'to train, submit the same script with DATA'
gpt39b 5
ends "gpt39b whose rehearsal failed" 5
gpt39b 0 CLUSTER= SLURM_JOB_NUM_NODES_HET_GROUP_0=9
ends "gpt39b on other nodes" 3
says "gpt39b on other nodes" '^gpt39b: error: there is no ./inputs/clusters/a100x9-v100x4.json' err
says "gpt39b on other nodes" '^hint: set CLUSTER' err
data=nowhere.txt
gpt39b 0
ends "gpt39b with a name that is wrong" 3
says "gpt39b with a name that is wrong" '^gpt39b: error: there is no nowhere.txt' err
data=LICENSE
gpt39b 0
ends gpt39b 0
says "gpt39b starts both components" '^srun --het-group=0,1 --mpi=pmix .* --plan outputs/gpt39b/plan.h5'
check "gpt39b has a plan" test -s "$tree/outputs/gpt39b/plan.h5"
says "gpt39b goes on from where it was, if it was anywhere" '--resume auto'
gpt39b 9
ends "gpt39b that was stopped" 0
says "gpt39b that was stopped" '^scontrol requeue 7'
gpt39b 5
ends "gpt39b that failed" 5

data=inputs/tokens.h5
gpt39b 0
ends "gpt39b with other data" 3
says "gpt39b with other data" '^gpt39b: error: outputs/gpt39b was made for the data LICENSE, not for inputs/tokens.h5' err
gpt39b 0 MODEL=gpt-15b
ends "gpt39b with another model" 3
mkdir "$tree/outputs/other" && cp "$tree"/outputs/gpt39b/{model,plan}.h5 "$tree/outputs/other" # the same ones
gpt39b 0 RUN=outputs/other
says "gpt39b takes a data file as it is" '--data inputs/tokens.h5 '
# Cores for each task, which srun does not take from the job.
printf '#!/bin/bash\necho "cores $SRUN_CPUS_PER_TASK"\n' >"$stand_ins/srun"
gpt39b 0 RUN=outputs/other SLURM_CPUS_PER_TASK_HET_GROUP_0=4
says "gpt39b passes on the cores of a task" '^cores 4$'
# Neither a build nor an installation.
mkdir "$scratch/empty"
for script in gpt39b two-subclusters; do
    (cd "$scratch/empty" && PATH=/usr/bin:/bin SLURM_JOB_ID=7 bash "$tree/jobs/$script.slurm") >"$scratch/out" 2>"$scratch/err"
    code=$?
    ends "$script without hapt" 3
    says "$script without hapt" "^$script: error: there is neither build/hapt here nor hapt on the PATH" err
    says "$script without hapt" '^hint: ' err
done
# Lines that Slurm reads stand before the first command, and sites find what to change.
for script in jobs/*.slurm; do
    check "$script: Slurm reads all lines" test -z "$(sed '1,/^set /d' "$script" | grep '^#SBATCH')"
    check "$script: both components take the memory of their nodes" test "$(grep -c '^#SBATCH --mem=0$' "$script")" -eq 2
    check "$script: an account to fill in" grep -q '^##SBATCH --account=' "$script"
    # as the comments say; sbatch reads no directive behind the first command
    sed 's/^##SBATCH/#SBATCH/; s/^## module/module/' "$script" >"$scratch/filled.slurm"
    check "$script: filled in, it is a script" bash -n "$scratch/filled.slurm"
    check "$script: the directives come before the first command" test "$(grep -n '^[^#]' "$scratch/filled.slurm" | head -n 1 | cut -d: -f2-)" = \
        "module load openmpi hdf5 hwloc jansson onednn" -a "$(grep -n '^#SBATCH' "$scratch/filled.slurm" | tail -n 1 | cut -d: -f1)" -lt \
        "$(grep -n '^module' "$scratch/filled.slurm" | cut -d: -f1)"
done

# jobs/case-study.py: both tables, and what it keeps (its numbers: case_study).
job /usr/bin/python3 jobs/case-study.py outputs/case
ends case-study 0
check "case-study: eight plans: $(cat "$scratch/out")" test "$(grep -cE '^ +(8|128)  (paper|hapt) .* t  .* %' "$scratch/out")" -eq 8
for file in 8 8-paper 8-hapt 128 128-paper 128-hapt; do check "case-study keeps case-$file.h5" test -s "$tree/outputs/case/case-$file.h5"; done

# A script that no test names has none.
for script in jobs/*; do check "$script has a test" grep -qF "${script##*/}" -r tests/system --include='*.sh'; done
finish
