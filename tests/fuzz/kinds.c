/* How hapt processes each kind of file. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../../src/train/checkpoint.h"
#include "fuzz.h"
#include "hapt/calibration.h"
#include "hapt/cluster.h"
#include "hapt/command.h"
#include "hapt/model.h"
#include "hapt/plan.h"
#include "hapt/profile.h"
#include "hapt/report.h"
#include "hapt/train.h"

enum { MOST_WORDS = 40, ROWS = 4, STEPS = 2, FIELDS = 3, MOST_OPERATORS = 20, MOST_MICROBATCHES = 64 };

#define GPT "--layers", "1", "--hidden", "8", "--heads", "2", "--sequence", "8", "--vocab", "256", "--microbatch", "2"
#define VIT                                                                                              \
    "--image", "8", "--patch", "4", "--layers", "1", "--hidden", "8", "--heads", "2", "--classes", "10", \
        "--microbatch", "2"
#define TINY "--layers", "1", "--hidden", "8", "--heads", "2", "--sequence", "8", "--vocab", "16", "--microbatch", "2"

static const char *const names[FUZZ_KINDS] = {"model",   "weights", "tokens",     "images",  "fields",
                                              "profile", "plan",    "checkpoint", "cluster", "efficiency",
                                              "run",     "resume",  "raw"};

const char *fuzz_kind_name(enum fuzz_kind kind)
{
    return kind < FUZZ_KINDS ? names[kind] : "none";
}

enum fuzz_kind fuzz_kind_of(const char *name)
{
    if (strncmp(name, "regression-", 11) == 0) name += 11;
    for (int kind = 0; kind < FUZZ_KINDS; kind++) {
        const size_t length = strlen(names[kind]);
        if (strncmp(name, names[kind], length) == 0 && name[length] == '-') return (enum fuzz_kind)kind;
    }
    return FUZZ_KINDS;
}

/* ---- Commands ---- */

typedef enum hapt_status command(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena);

static enum hapt_status run(struct hapt_env *env, const char *const *words, struct hapt_arena *arena)
{
    static command *const commands[HAPT_COMMAND_COUNT] = {
        [HAPT_COMMAND_JOB] = hapt_command_job,           [HAPT_COMMAND_TRAIN] = hapt_command_train,
        [HAPT_COMMAND_DATA] = hapt_command_data,         [HAPT_COMMAND_TOPOLOGY] = hapt_command_topology,
        [HAPT_COMMAND_PROFILE] = hapt_command_profile,   [HAPT_COMMAND_PLAN] = hapt_command_plan,
        [HAPT_COMMAND_SPMD] = hapt_command_spmd,         [HAPT_COMMAND_EXPORT] = hapt_command_export,
        [HAPT_COMMAND_SIMULATE] = hapt_command_simulate, [HAPT_COMMAND_MODEL] = hapt_command_model,
        [HAPT_COMMAND_REPORT] = hapt_command_report,     [HAPT_COMMAND_CHECK] = hapt_command_check};
    char *argument[MOST_WORDS];
    int count = 0;
    struct hapt_config *config;
    while (words[count] && count < MOST_WORDS) {
        if (!(argument[count] = hapt_arena_strdup(arena, words[count]))) return HAPT_ERR_MEMORY;
        count++;
    }
    HAPT_TRY(hapt_config_parse(count, argument, arena, &config));
    HAPT_ASSERT(commands[hapt_config_command(config)]);
    env->quiet = hapt_config_command(config) != HAPT_COMMAND_EXPORT && hapt_config_bool(config, "json");
    return commands[hapt_config_command(config)](env, config, arena);
}

/* The output of the last file may be of another kind, and then it would not be overwritten. */
#define RUN(...) (unlink(place->output), run)(place->env, (const char *const[]){"hapt", __VA_ARGS__, NULL}, arena)

/* Trains two steps on named inputs. */
static enum hapt_status use_fields(const struct fuzz_place *place, const char *path, struct hapt_arena *arena)
{
    char model[512], cluster[512];
    snprintf(model, sizeof model, "%s/model-python-fields.h5", place->corpus);
    snprintf(cluster, sizeof cluster, "%s/cluster-one.json", place->corpus);
    fuzz_remove(place->run);
    return RUN("--input", model, "--data", path, "--cluster", cluster, "--predict", "--microbatches", "2", "--steps",
               "2", "--threads", "1", "--output", place->run);
}

static enum hapt_status use_profile(const struct fuzz_place *place, const char *path, struct hapt_arena *arena)
{
    switch (fuzz_below(place->random, 8)) {
    case 0: return RUN("plan", "--profile", path, "--microbatches", "3", "--explain", "--json");
    case 1: return RUN("plan", "--profile", path, "--microbatches", "5", "--compare");
    case 2: return RUN("plan", "--profile", path, "--microbatches", "4", "--strategy", "even", "--schedule", "gpipe");
    case 3: return RUN("plan", "--profile", path, "--microbatches", "64", "--what-if", "link=1..25Gbit/s:3");
    default: return RUN("plan", "--profile", path, "--microbatches", "4", "--output", place->output);
    }
}

/* Training takes as long as the plan requires. Here plans with few microbatches are run. */
static bool is_short(const struct hapt_plan *plan)
{
    return plan->microbatches <= MOST_MICROBATCHES;
}

static enum hapt_status train_by_plan(const struct fuzz_place *place, const char *path, struct hapt_arena *arena)
{
    struct hapt_plan *plan;
    char model[512], cluster[512];
    const bool loaded = hapt_plan_load(path, arena, &plan) == HAPT_OK;
    hapt_fail_reset();
    if (!loaded || !is_short(plan)) return RUN("simulate", "--plan", path);
    snprintf(model, sizeof model, "%s/model-tiny.h5", place->corpus);
    snprintf(cluster, sizeof cluster, "%s/cluster-one.json", place->corpus);
    fuzz_remove(place->run);
    return RUN("train", "--input", model, "--plan", path, "--cluster", cluster, "--steps", "1", "--threads", "1",
               "--output", place->run);
}

static enum hapt_status use_plan(const struct fuzz_place *place, const char *path, struct hapt_arena *arena)
{
    char other[512];
    snprintf(other, sizeof other, "%s/plan-plain.h5", place->corpus);
    switch (fuzz_below(place->random, 7)) {
    case 3:
    case 4: return train_by_plan(place, path, arena);
    case 0: return RUN("plan", "--diff", path, other);
    case 1: return RUN("plan", "--diff", other, path, "--json");
    case 2: return RUN("simulate", "--plan", path, "--schedule", "gpipe", "--microbatches", "7", "--json");
    default: return RUN("simulate", "--plan", path);
    }
}

/* Synthesis takes up to half a minute for some graphs, and longer with sanitizers. Here small ones are synthesised. */
static bool is_small(const char *path, struct hapt_arena *arena)
{
    struct hapt_model *model;
    const bool loaded = hapt_model_load(path, arena, &model) == HAPT_OK;
    hapt_fail_reset();
    return loaded && model->graph->forward_count <= MOST_OPERATORS;
}

static enum hapt_status use_model(const struct fuzz_place *place, const char *path, struct hapt_arena *arena)
{
    char cluster[512];
    snprintf(cluster, sizeof cluster, "%s/cluster-all.json", place->corpus);
    if (fuzz_chance(place->random, 0.02) && is_small(path, arena))
        return RUN("spmd", "--input", path, "--cluster", cluster);
    return RUN("profile", "--input", path, "--cluster", cluster, "--predict", "--layers-per-model", "3",
               "--tensor-parallel", "1", "--output", place->output);
}

/* Planning for a large cluster takes long. Here small ones are used. */
static enum hapt_status use_cluster(const struct fuzz_place *place, const char *path, struct hapt_arena *arena)
{
    char model[512];
    struct hapt_cluster *cluster;
    snprintf(model, sizeof model, "%s/model-gpt.h5", place->corpus);
    const bool loaded = hapt_cluster_load(path, arena, &cluster) == HAPT_OK;
    hapt_fail_reset();
    if (!loaded || cluster->rank_count > 16 || fuzz_chance(place->random, 0.5))
        return RUN("topology", "--cluster", path, "--json");
    return RUN("profile", "--input", model, "--cluster", path, "--predict", "--layers-per-model", "2", "--output",
               place->output);
}

/* The kind of an input of `hapt data` can only be guessed. */
static enum hapt_status use_raw(const struct fuzz_place *place, const char *path, struct hapt_arena *arena)
{
    static const char *const type[] = {"auto", "auto", "bytes", "uint16", "llmc", "cifar10", "cifar10"};
    return RUN("data", path, "--type", type[fuzz_below(place->random, 7)], "--output", place->output,
               fuzz_chance(place->random, 0.5) ? "--json" : NULL);
}

static enum hapt_status use_report(const struct fuzz_place *place, const char *path, struct hapt_arena *arena)
{
    switch (fuzz_below(place->random, 3)) {
    case 0: return RUN("report", "--input", path);
    case 1: return RUN("report", "--input", path, "--json");
    default: return RUN("report", "--input", path, "--timeline", place->output);
    }
}

/* Makes the folder of a run with the checkpoint at `path` and an older checkpoint of the corpus. */
static enum hapt_status make_run(const struct fuzz_place *place, const char *path, const char *older)
{
    char folder[512], from[512];
    fuzz_remove(place->run);
    mkdir(place->run, 0777);
    snprintf(folder, sizeof folder, "%s/checkpoints", place->run);
    mkdir(folder, 0777);
    snprintf(folder, sizeof folder, "%s/checkpoints/step-00000002", place->run);
    bool made = fuzz_link(path, folder);
    if (older) {
        snprintf(folder, sizeof folder, "%s/checkpoints/step-00000001", place->run);
        snprintf(from, sizeof from, "%s/%s", place->corpus, older);
        made = fuzz_copy(from, folder) && made;
    }
    return made ? HAPT_OK : hapt_fail(HAPT_ERR_IO, NULL, "the folder of a run cannot be made");
}

/* Two stages resumed on one rank: another plan, and weights from both shards. */
static enum hapt_status resume_anew(const struct fuzz_place *place, const char *path, struct hapt_arena *arena)
{
    char model[512], cluster[512], profile[512], data[512];
    snprintf(model, sizeof model, "%s/model-gpt.h5", place->corpus);
    snprintf(cluster, sizeof cluster, "%s/cluster-one.json", place->corpus);
    snprintf(profile, sizeof profile, "%s/profile-one.h5", place->corpus);
    snprintf(data, sizeof data, "%s/tokens-stream.h5", place->corpus);
    HAPT_TRY(make_run(place, path, NULL));
    return RUN("--input", model, "--data", data, "--cluster", cluster, "--profile", profile, "--resume", "yes",
               "--replan", "--steps", "3", "--microbatches", "2", "--threads", "1", "--output", place->run);
}

static enum hapt_status use(const struct fuzz_place *place, enum fuzz_kind kind, const char *path,
                            struct hapt_arena *arena)
{
    char model[512], cluster[512];
    snprintf(model, sizeof model, "%s/model-gpt.h5", place->corpus);
    snprintf(cluster, sizeof cluster, "%s/cluster-all.json", place->corpus);
    if (fuzz_chance(place->random, 0.1)) return RUN("check", path);
    switch (kind) {
    case FUZZ_MODEL: return use_model(place, path, arena);
    case FUZZ_WEIGHTS: return RUN("model", "gpt", GPT, "--weights", path, "--output", place->output);
    case FUZZ_TOKENS: return RUN("model", "gpt", GPT, "--data", path, "--output", place->output);
    case FUZZ_IMAGES: return RUN("model", "vit", VIT, "--data", path, "--output", place->output);
    case FUZZ_FIELDS: return use_fields(place, path, arena);
    case FUZZ_PROFILE: return use_profile(place, path, arena);
    case FUZZ_PLAN: return use_plan(place, path, arena);
    case FUZZ_CHECKPOINT:
        if (fuzz_chance(place->random, 0.4)) return resume_anew(place, path, arena);
        return RUN("export", "--checkpoint", path, "--output", place->output);
    case FUZZ_RESUME: return RUN("export", "--checkpoint", path, "--output", place->output);
    case FUZZ_RAW: return use_raw(place, path, arena);
    case FUZZ_CLUSTER: return use_cluster(place, path, arena);
    case FUZZ_EFFICIENCY:
        return RUN("profile", "--input", model, "--cluster", cluster, "--predict", "--layers-per-model", "2",
                   "--efficiency", path, "--output", place->output);
    case FUZZ_RUN: return use_report(place, path, arena);
    case FUZZ_KINDS: break;
    }
    return HAPT_OK;
}

enum hapt_status fuzz_use(const struct fuzz_place *place, enum fuzz_kind kind, const char *path)
{
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    const enum hapt_status status = use(place, kind, path, &arena);
    hapt_arena_release(&arena);
    return status;
}

/* ---- Content that was read ---- */

/* The zoo's model with the shapes above, for which weights and data are read. */
static enum hapt_status build_model(const char *family, struct hapt_arena *arena, struct hapt_model **model)
{
    const char *const gpt[] = {"hapt", "model", "gpt", GPT}, *const vit[] = {"hapt", "model", "vit", VIT},
                      *const tiny[] = {"hapt", "model", "gpt", TINY};
    const bool images = strcmp(family, "vit") == 0, is_tiny = strcmp(family, "tiny") == 0;
    const char *const *words = images ? vit : is_tiny ? tiny : gpt;
    const int count = (int)(images ? sizeof vit / sizeof *vit : sizeof gpt / sizeof *gpt);
    char *argument[MOST_WORDS];
    struct hapt_config *config;
    for (int i = 0; i < count; i++)
        if (!(argument[i] = hapt_arena_strdup(arena, words[i]))) return HAPT_ERR_MEMORY;
    HAPT_TRY(hapt_config_parse(count, argument, arena, &config));
    return hapt_model_build(images ? "vit" : "gpt", config, arena, model);
}

/* Built once. */
static enum hapt_status known_model(const char *family, struct hapt_model **model)
{
    static const char *const name[] = {"gpt", "tiny", "vit"};
    static struct hapt_model *built[3];
    static struct hapt_arena arena;
    int i = 0;
    while (strcmp(name[i], family) != 0) i++;
    if (!built[i]) HAPT_TRY(build_model(family, &arena, &built[i]));
    *model = built[i];
    return HAPT_OK;
}

/* The content is written again by the writer of its kind. That file contains all that the reader knows. */
static enum hapt_status content_of_output(const struct fuzz_place *place, enum hapt_status status, uint64_t *content)
{
    if (status == HAPT_OK) *content = fuzz_content(place->output);
    if (status == HAPT_OK && *content == 0) return hapt_fail(HAPT_ERR_INTERNAL, NULL, "what hapt wrote cannot be read");
    return status;
}

static enum hapt_status read_model(const struct fuzz_place *place, const char *path, struct hapt_arena *arena,
                                   uint64_t *content)
{
    struct hapt_model *model;
    HAPT_TRY(hapt_model_load(path, arena, &model));
    return content_of_output(
        place,
        hapt_model_save(model, model->has_parameters ? path : NULL, model->has_data ? path : NULL, place->output),
        content);
}

/* By the reader of training: every row of every step. */
static enum hapt_status read_rows(const struct fuzz_place *place, const struct hapt_model *model, const char *path,
                                  uint64_t *content)
{
    static float value[ROWS * 3 * 8 * 8];
    static int32_t target[ROWS * 8];
    const bool images = model->classes > 0;
    struct hapt_data *data;
    HAPT_TRY(hapt_data_open(place->env, path, model, &(struct hapt_data_order){ROWS, STEPS, 1, false}, &data));
    *content = 1;
    for (int64_t step = 0; step < STEPS; step++) {
        const int64_t count = hapt_data_targets(data, step);
        hapt_data_read(data, images ? HAPT_ROLE_IMAGES : HAPT_ROLE_TOKENS, -1, step, 0, ROWS, value);
        hapt_data_read(data, images ? HAPT_ROLE_LABELS : HAPT_ROLE_TARGETS, -1, step, 0, ROWS, target);
        *content = hapt_hash(*content, value, images ? sizeof value : ROWS * 8 * sizeof(int32_t));
        *content = hapt_hash(*content, target, images ? ROWS * sizeof *target : sizeof target);
        *content = hapt_hash(*content, &count, sizeof count);
    }
    hapt_data_close(data);
    return HAPT_OK;
}

/* Reads named inputs as read_rows does. */
static enum hapt_status read_fields(const struct fuzz_place *place, const char *path, struct hapt_arena *arena,
                                    uint64_t *content)
{
    static float value[ROWS * 16];
    struct hapt_model *model;
    struct hapt_data *data;
    char name[512];
    snprintf(name, sizeof name, "%s/model-python-fields.h5", place->corpus);
    HAPT_TRY(hapt_model_load(name, arena, &model));
    HAPT_TRY(hapt_data_open(place->env, path, model, &(struct hapt_data_order){ROWS, STEPS, 1, false}, &data));
    *content = 1;
    for (int64_t step = 0; step < STEPS; step++) {
        const int64_t count = hapt_data_targets(data, step);
        *content = hapt_hash(*content, &count, sizeof count);
        for (int field = 0; field < FIELDS; field++) {
            memset(value, 0, sizeof value);
            hapt_data_read(data, HAPT_ROLE_FIELD, field, step, 0, ROWS, value);
            *content = hapt_hash(*content, value, sizeof value);
        }
    }
    hapt_data_close(data);
    return HAPT_OK;
}

static enum hapt_status read_data(const struct fuzz_place *place, const char *family, const char *path,
                                  uint64_t *content)
{
    struct hapt_model *model;
    uint64_t rows = 0;
    HAPT_TRY(known_model(family, &model));
    HAPT_TRY(read_rows(place, model, path, &rows));
    HAPT_TRY(content_of_output(place, hapt_model_save(model, NULL, path, place->output), content));
    *content = hapt_hash(*content, &rows, sizeof rows);
    return HAPT_OK;
}

static enum hapt_status read_weights(const struct fuzz_place *place, const char *path, uint64_t *content)
{
    struct hapt_model *model;
    HAPT_TRY(known_model("gpt", &model));
    return content_of_output(place, hapt_model_save(model, path, NULL, place->output), content);
}

static enum hapt_status read_cluster(const struct fuzz_place *place, const char *path, struct hapt_arena *arena,
                                     uint64_t *content)
{
    struct hapt_cluster *cluster, *again;
    struct hapt_h5 *file;
    HAPT_TRY(hapt_cluster_load(path, arena, &cluster));
    HAPT_TRY(hapt_h5_create(place->output, "hapt-test", 1, &file));
    enum hapt_status status = hapt_cluster_write(file, "/topology", cluster);
    if (status != HAPT_OK) hapt_h5_close(file);
    HAPT_TRY(status);
    HAPT_TRY(content_of_output(place, hapt_h5_commit(file), content));
    HAPT_TRY(hapt_h5_open(place->output, "hapt-test", 1, false, &file));
    status = hapt_cluster_read(file, "/topology", arena, &again);
    hapt_h5_close(file);
    return status == HAPT_OK ? status : hapt_fail(HAPT_ERR_INTERNAL, NULL, "a saved cluster is not read back");
}

static enum hapt_status read_report(const char *path, struct hapt_arena *arena, uint64_t *content)
{
    struct hapt_report *report;
    HAPT_TRY(hapt_report_load(path, arena, &report));
    const double figures[] = {(double)report->steps,    (double)report->first_step, report->first_loss,
                              report->last_loss,        report->mean_loss,          report->step_s,
                              report->predicted_step_s, report->items_per_s,        report->flops_per_item};
    *content = hapt_hash(1, figures, sizeof figures);
    *content = hapt_hash(*content, report->stage, (size_t)report->plan->stage_count * sizeof *report->stage);
    *content = hapt_hash(*content, report->checkpoint, strlen(report->checkpoint));
    *content = hapt_hash(*content, report->item, strlen(report->item));
    if (report->loss) *content = hapt_hash(*content, report->loss, (size_t)report->steps * sizeof *report->loss);
    if (report->rank_count > 0)
        *content = hapt_hash(*content, report->environment, (size_t)report->rank_count * sizeof *report->environment);
    for (int w = 0; w < report->warning_count; w++)
        *content = hapt_hash(*content, report->warning[w].text, strlen(report->warning[w].text));
    return HAPT_OK;
}

static enum hapt_status read_state(const struct hapt_checkpoint *checkpoint, int64_t p, int64_t elements,
                                   uint64_t *content)
{
    float *value = calloc((size_t)elements + 1, sizeof *value);
    enum hapt_status status = value ? HAPT_OK : HAPT_ERR_MEMORY;
    for (int state = -1; status == HAPT_OK && state < checkpoint->state_count; state++) {
        status = hapt_checkpoint_read(checkpoint, checkpoint->parameter[p], state, elements, value);
        *content = hapt_hash(*content, value, (size_t)elements * sizeof *value);
    }
    free(value);
    return status;
}

static enum hapt_status read_states(const struct hapt_checkpoint *checkpoint, const struct hapt_model *model,
                                    uint64_t *content)
{
    for (int64_t p = 0; p < checkpoint->parameter_count; p++) {
        const int t = hapt_graph_find_tensor(model->graph, checkpoint->parameter[p]);
        if (t >= 0) HAPT_TRY(read_state(checkpoint, p, hapt_tensor_elements(&model->graph->tensor[t]), content));
    }
    return HAPT_OK;
}

/* Weights and optimizer states, options, history and plan. */
static enum hapt_status read_checkpoint(const struct fuzz_place *place, const char *family, const char *path,
                                        struct hapt_arena *arena, uint64_t *content)
{
    struct hapt_checkpoint *checkpoint;
    struct hapt_model *model;
    HAPT_TRY(known_model(family, &model));
    HAPT_TRY(hapt_checkpoint_find(place->env, path, arena, &checkpoint));
    HAPT_TRY(hapt_checkpoint_fits(checkpoint, model));
    HAPT_TRY(content_of_output(place, hapt_plan_save(place->output, checkpoint->plan), content));
    const struct hapt_history *history = &checkpoint->history;
    const double *const curve[] = {history->loss, history->gradient_norm, history->learning_rate, history->time_s};
    *content = hapt_hash(*content, &checkpoint->step, sizeof checkpoint->step);
    for (int k = 0; k < 4 && history->count > 0; k++)
        *content = hapt_hash(*content, curve[k], (size_t)history->count * sizeof(double));
    for (int64_t i = 0; i < checkpoint->option_count; i++) {
        *content = hapt_hash(*content, checkpoint->option[i], strlen(checkpoint->option[i]));
        *content = hapt_hash(*content, checkpoint->value[i], strlen(checkpoint->value[i]));
    }
    return read_states(checkpoint, model, content);
}

static enum hapt_status resume(const struct fuzz_place *place, const char *path, struct hapt_arena *arena,
                               uint64_t *weights, bool *fell_back)
{
    char model[512], cluster[512];
    struct hapt_checkpoint *checkpoint;
    struct hapt_model *tiny;
    snprintf(model, sizeof model, "%s/model-tiny.h5", place->corpus);
    snprintf(cluster, sizeof cluster, "%s/cluster-one.json", place->corpus);
    HAPT_TRY(make_run(place, path, "older-tiny"));
    const bool found = hapt_checkpoint_find(place->env, place->run, arena, &checkpoint) == HAPT_OK;
    hapt_fail_reset();
    *fell_back = found && strstr(checkpoint->path, "step-00000001");
    if (found && !is_short(checkpoint->plan)) return RUN("export", "--checkpoint", path, "--output", place->output);
    HAPT_TRY(RUN("train", "--input", model, "--cluster", cluster, "--resume", "yes", "--steps", "3", "--threads", "1",
                 "--output", place->run));
    HAPT_TRY(known_model("tiny", &tiny));
    HAPT_TRY(hapt_checkpoint_find(place->env, place->run, arena, &checkpoint));
    *weights = hapt_hash(1, &checkpoint->step, sizeof checkpoint->step);
    return read_states(checkpoint, tiny, weights);
}

enum hapt_status fuzz_resume(const struct fuzz_place *place, const char *path, uint64_t *weights, bool *fell_back)
{
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    *weights = 0;
    *fell_back = false;
    const enum hapt_status status = resume(place, path, &arena, weights, fell_back);
    hapt_arena_release(&arena);
    return status;
}

static enum hapt_status read_raw(const struct fuzz_place *place, const char *path, struct hapt_arena *arena,
                                 uint64_t *content)
{
    return content_of_output(place, RUN("data", path, "--output", place->output), content);
}

static enum hapt_status read_kind(const struct fuzz_place *place, enum fuzz_kind kind, const char *path,
                                  struct hapt_arena *arena, uint64_t *content)
{
    struct hapt_profile *profile;
    struct hapt_plan *plan;
    struct hapt_efficiency *efficiency;
    switch (kind) {
    case FUZZ_MODEL: return read_model(place, path, arena, content);
    case FUZZ_WEIGHTS: return read_weights(place, path, content);
    case FUZZ_TOKENS: return read_data(place, "gpt", path, content);
    case FUZZ_IMAGES: return read_data(place, "vit", path, content);
    case FUZZ_FIELDS: return read_fields(place, path, arena, content);
    case FUZZ_PROFILE:
        HAPT_TRY(hapt_profile_load(path, arena, &profile));
        return content_of_output(place, hapt_profile_save(place->output, profile), content);
    case FUZZ_PLAN:
        HAPT_TRY(hapt_plan_load(path, arena, &plan));
        return content_of_output(place, hapt_plan_save(place->output, plan), content);
    case FUZZ_EFFICIENCY:
        HAPT_TRY(hapt_efficiency_load(path, arena, &efficiency));
        return content_of_output(place, hapt_efficiency_save(place->output, efficiency), content);
    case FUZZ_CLUSTER: return read_cluster(place, path, arena, content);
    case FUZZ_CHECKPOINT: return read_checkpoint(place, "gpt", path, arena, content);
    case FUZZ_RESUME: return read_checkpoint(place, "tiny", path, arena, content);
    case FUZZ_RAW: return read_raw(place, path, arena, content);
    case FUZZ_RUN: return read_report(path, arena, content);
    case FUZZ_KINDS: break;
    }
    return HAPT_OK;
}

enum hapt_status fuzz_read(const struct fuzz_place *place, enum fuzz_kind kind, const char *path, uint64_t *content)
{
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    const enum hapt_status status = read_kind(place, kind, path, &arena, content);
    hapt_arena_release(&arena);
    return status;
}

bool fuzz_repair(const char *folder)
{
    enum { SHARDS = 2 };
    char path[512];
    int64_t size[SHARDS], checksum[SHARDS];
    int count = 0;
    while (count < SHARDS) {
        snprintf(path, sizeof path, "%s/shard-%04d.h5", folder, count);
        if (access(path, R_OK) != 0 || checkpoint_measure(path, &size[count], &checksum[count]) != HAPT_OK) break;
        count++;
    }
    snprintf(path, sizeof path, "%s/manifest.h5", folder);
    return fuzz_put(path, "/shard_size", count, size) && fuzz_put(path, "/shard_checksum", count, checksum);
}
