/*
 * Plans for other trainers: the modules of each stage, and PyTorch's schedule as a CSV file of its pipelining runtime.
 *
 * Modules are those of the parameters' names: a block ("model.layers.3") or what is outside of blocks ("model.norm").
 * These trainers cut models between modules, and give all stages as many devices. The sentences in "cannot" name what
 * else of the plan is lost.
 */
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "emit.h"
#include "hapt/folder.h"

enum { MOST_NAME = 256 };

static const char *const trainer_name[] = {[HAPT_TRAINER_TORCHTITAN] = "torchtitan",
                                           [HAPT_TRAINER_MEGATRON] = "megatron",
                                           [HAPT_TRAINER_DEEPSPEED] = "deepspeed"};
enum { TRAINERS = sizeof trainer_name / sizeof *trainer_name };
#define SCHEDULE_FILE "schedule.csv"

struct module {
    char name[MOST_NAME];
    int stage;
    bool block, attends;
};

struct trainer_plan {
    const struct hapt_plan *plan;
    const struct hapt_model *model;
    enum hapt_trainer trainer;
    struct hapt_arena *arena;
    int count;
    struct module *module; /* [count] in the graph's order */
    bool *used;            /* [tensors] parameters of earlier operators */
    bool tied;             /* a stage uses a parameter of another one */
    json_t *cannot;
};

bool hapt_trainer_parse(const char *name, enum hapt_trainer *trainer)
{
    for (int k = 0; k < TRAINERS; k++) {
        if (strcmp(name, trainer_name[k]) != 0) continue;
        *trainer = (enum hapt_trainer)k;
        return true;
    }
    return false;
}

static void file_name(enum hapt_trainer trainer, char name[MOST_NAME])
{
    snprintf(name, MOST_NAME, "%s.json", trainer_name[trainer]);
}

bool hapt_trainer_is_own(const char *name)
{
    char own[MOST_NAME];
    for (int k = 0; k < TRAINERS; k++) {
        file_name((enum hapt_trainer)k, own);
        if (strcmp(name, own) == 0) return true;
    }
    return strcmp(name, SCHEDULE_FILE) == 0;
}

/* ---- Modules ---- */

/* The block that a parameter belongs to, "model.layers.3" of "model.layers.3.mlp.up_proj.weight"; else its module,
 * "model.norm" of "model.norm.weight". Returns true for a block. */
static bool module_of(const char *parameter, char name[MOST_NAME])
{
    const char *end = strrchr(parameter, '.');
    bool block = false;
    for (const char *dot = strchr(parameter, '.'); dot && !block; dot = strchr(dot + 1, '.')) {
        const size_t digits = strspn(dot + 1, "0123456789");
        block = digits > 0 && dot[1 + digits] == '.';
        if (block) end = dot + 1 + digits;
    }
    snprintf(name, MOST_NAME, "%.*s", (int)(end ? end - parameter : (long)strlen(parameter)), parameter);
    return block;
}

static struct module *find(const struct trainer_plan *of, const char *name)
{
    for (int k = 0; k < of->count; k++)
        if (strcmp(of->module[k].name, name) == 0) return &of->module[k];
    return NULL;
}

static void add(struct trainer_plan *of, const char *name, int stage, bool block)
{
    struct module *module = &of->module[of->count++];
    snprintf(module->name, sizeof module->name, "%s", name);
    module->stage = stage;
    module->block = block;
}

/* Adds the modules of an operator's parameters. A tied parameter belongs to the stage of its first operator. The module
 * of a later operator has that operator's name. */
static enum hapt_status add_modules(struct trainer_plan *of, int stage, const struct hapt_op *op)
{
    for (int i = 0; i < op->input_count; i++) {
        char name[MOST_NAME];
        const int t = op->input[i];
        if (t < 0 || of->model->graph->tensor[t].kind != HAPT_TENSOR_PARAMETER) continue;
        const bool block = module_of(of->model->graph->tensor[t].name, name), tied = of->used[t];
        const struct module *known = find(of, name);
        of->used[t] = true;
        if (!known) add(of, name, stage, block);
        if (!known || known->stage == stage) continue;
        if (!tied || block)
            return hapt_fail(HAPT_ERR_INPUT,
                             "plan with --recompute all, where stages begin at repeated blocks, or give other --stages",
                             "stage %d begins inside %s, but %s cuts models between modules", stage, name,
                             trainer_name[of->trainer]);
        of->tied = true;
        if (!find(of, op->name)) add(of, op->name, stage, false);
    }
    return HAPT_OK;
}

/* Notes the block of an attention. */
static void note_attention(struct trainer_plan *of, const struct hapt_op *op)
{
    for (int k = 0; k < of->count; k++) {
        const size_t length = strlen(of->module[k].name);
        if (strncmp(of->module[k].name, op->name, length) == 0 && op->name[length] == '.') of->module[k].attends = true;
    }
}

static enum hapt_status find_modules(struct trainer_plan *of)
{
    const struct hapt_graph *graph = of->model->graph;
    HAPT_NEW(of->module, of->arena, graph->tensor_count + graph->op_count);
    HAPT_NEW(of->used, of->arena, graph->tensor_count);
    for (int s = 0; s < of->plan->stage_count; s++) {
        const struct hapt_plan_stage *stage = &of->plan->stage[s];
        HAPT_ASSERT(stage->first_op >= 0 && stage->end_op <= graph->forward_count);
        const int before = of->count;
        for (int op = stage->first_op; op < stage->end_op; op++) {
            HAPT_TRY(add_modules(of, s, &graph->op[op]));
            if (strstr(hapt_op_type_at(graph->op[op].type)->name, "attention")) note_attention(of, &graph->op[op]);
        }
        if (of->count == before)
            return hapt_fail(HAPT_ERR_INPUT,
                             "plan with --recompute all, where stages begin at repeated blocks, or give other --stages",
                             "stage %d has no module of its own", s);
    }
    return HAPT_OK;
}

static json_t *modules_of(const struct trainer_plan *of, int stage)
{
    json_t *list = json_array();
    for (int k = 0; k < of->count; k++)
        if (of->module[k].stage == stage) json_array_append_new(list, json_string(of->module[k].name));
    return list;
}

/* ---- Sentences on the limits of the trainer ---- */

__attribute__((format(printf, 2, 3))) static void cannot(struct trainer_plan *of, const char *format, ...)
{
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    json_array_append_new(of->cannot, json_string(text));
}

/* "2, 1, 1" */
static const char *list_of(const struct trainer_plan *of, int (*value)(const struct hapt_plan_stage *stage),
                           char text[200], bool *unlike)
{
    size_t used = 0;
    const int first = value(&of->plan->stage[0]);
    *unlike = false;
    text[0] = '\0';
    for (int s = 0; s < of->plan->stage_count; s++) {
        const int its = value(&of->plan->stage[s]);
        *unlike = *unlike || its != first;
        if (used < 180) used += (size_t)snprintf(text + used, 200 - used, "%s%d", s ? ", " : "", its);
    }
    return text;
}

static int devices_of(const struct hapt_plan_stage *stage)
{
    return stage->submesh->nodes * stage->submesh->devices_per_node;
}

static int launches_of(const struct hapt_plan_stage *stage)
{
    return stage->warmup;
}

static int degree_of(const struct hapt_plan_stage *stage)
{
    return stage->layout.tensor_parallel > 1 ? stage->layout.tensor_parallel : 1;
}

static int units_of(const struct hapt_plan_stage *stage)
{
    return stage->layout.unit_count;
}

/* The launch counts of 1F1B: as many as stages are left. */
static bool is_1f1b(const struct hapt_plan *plan)
{
    for (int s = 0; s < plan->stage_count; s++) {
        const int left = plan->stage_count - s, wanted = left < plan->microbatches ? left : plan->microbatches;
        if (plan->stage[s].warmup != wanted) return false;
    }
    return true;
}

static void name_losses(struct trainer_plan *of)
{
    const struct hapt_plan *plan = of->plan;
    const char *name = trainer_name[of->trainer];
    const bool own_schedule = of->trainer == HAPT_TRAINER_TORCHTITAN, loops = hapt_schedule_loops(plan->schedule);
    char text[200];
    bool unlike, mixed = false, frozen = false, programs = false, away = plan->host_state, recomputes = false;
    list_of(of, devices_of, text, &unlike);
    if (unlike) cannot(of, "The stages have %s devices; %s gives each stage as many.", text, name);
    list_of(of, degree_of, text, &unlike);
    if (unlike) cannot(of, "The tensor-parallel degrees are %s; %s has one for all stages.", text, name);
    for (int s = 0; s < plan->stage_count; s++) {
        mixed = mixed || hapt_plan_is_mixed(&plan->stage[s]);
        frozen = frozen || plan->stage[s].forward_only;
        programs = programs || plan->stage[s].layout.kind == HAPT_LAYOUT_PROGRAM;
        away = away || plan->stage[s].layout.weights_at != HAPT_WEIGHTS_RESIDENT;
        recomputes = recomputes || units_of(&plan->stage[s]) > 0;
    }
    if (mixed) cannot(of, "Unlike devices share a stage, with unlike numbers of rows; %s splits rows evenly.", name);
    if (frozen) cannot(of, "A stage has no backward pass, since nothing trains up to it; %s runs one.", name);
    if (plan->split && !own_schedule) cannot(of, "Backward passes are split; %s does not split them.", name);
    list_of(of, launches_of, text, &unlike);
    if (!own_schedule && !loops && !is_1f1b(plan))
        cannot(of, "The stages launch %s forward passes before their first backward; %s runs 1F1B.", text, name);
    if (of->trainer == HAPT_TRAINER_MEGATRON && loops && plan->schedule != HAPT_SCHEDULE_INTERLEAVED)
        cannot(of, "The schedule is %s; megatron runs the interleaved one.", hapt_schedule_kind_name(plan->schedule));
    if (of->tied)
        cannot(of, "Stages share tied parameters, and the plan sums their gradients once a step; %s %s.", name,
               of->trainer == HAPT_TRAINER_TORCHTITAN ? "trains a copy in each stage"
                                                      : "needs its own option for that");
    if (hapt_model_document_end(of->model) >= 0)
        cannot(of, "Token %lld ends documents, which do not see each other; %s %s.",
               (long long)hapt_model_document_end(of->model), name,
               of->trainer == HAPT_TRAINER_MEGATRON
                   ? "needs --reset-position-ids, --reset-attention-mask and --eod-mask-loss"
                   : "needs a mask of its own for that");
    if (programs) cannot(of, "A stage runs a synthesised program, which %s does not know.", name);
    if (away) cannot(of, "Weights or optimizer state are on the hosts, or sharded; see the options of %s.", name);
    if (recomputes)
        cannot(of, "The stages recompute %s of their units; see the options of %s.",
               list_of(of, units_of, text, &unlike), name);
    cannot(of, "hapt hides transfers behind computation; what %s hides is not known, so its step may be longer.", name);
}

/* ---- The files ---- */

/* A row of each rank: stage, F, B, I (the backward pass without weights' gradients) or W, microbatch. */
static enum hapt_status write_schedule(struct trainer_plan *of, FILE *file)
{
    struct hapt_schedule *schedule;
    HAPT_TRY(hapt_plan_schedule(of->plan, of->plan->exchange_s > 0, of->arena, &schedule));
    for (int submesh = 0; submesh < schedule->submesh_count; submesh++) {
        const struct hapt_instruction_list *list = &schedule->list[submesh];
        const char *comma = "";
        for (int i = 0; i < list->count; i++) {
            const struct hapt_instruction *at = &list->instruction[i];
            const char *action = at->kind == HAPT_INSTRUCTION_FORWARD    ? "F"
                                 : at->kind == HAPT_INSTRUCTION_BACKWARD ? of->plan->split ? "I" : "B"
                                 : at->kind == HAPT_INSTRUCTION_WEIGHT   ? "W"
                                                                         : NULL;
            if (!action) continue;
            fprintf(file, "%s%d%s%d", comma, at->chunk, action, at->microbatch);
            comma = ",";
        }
        fprintf(file, "\n");
    }
    return HAPT_OK;
}

static json_t *torchtitan(const struct trainer_plan *of)
{
    json_t *parts = json_array();
    for (int s = 0; s < of->plan->stage_count; s++) json_array_append_new(parts, modules_of(of, s));
    return json_pack("{s:i, s:s, s:s, s:o}", "pipeline_parallel_degree", of->plan->submesh_count,
                     "pipeline_parallel_schedule", "PipelineScheduleMulti", "pipeline_parallel_schedule_csv",
                     SCHEDULE_FILE, "module_fqns_per_model_part", parts);
}

/* E: embedding, t: a transformer layer, L: the loss; | ends a stage. */
static json_t *megatron(struct trainer_plan *of)
{
    const int stages = of->plan->stage_count;
    const size_t room = 16 * (size_t)stages + (size_t)of->count + 16;
    char *layout = hapt_arena_alloc(of->arena, room, 1);
    size_t used = 0;
    if (!layout) return NULL;
    for (int s = 0; s < stages; s++) {
        int blocks = 0;
        if (s > 0) layout[used++] = '|';
        if (s == 0) layout[used++] = 'E';
        for (int k = 0; k < of->count; k++) blocks += of->module[k].stage == s && of->module[k].block;
        if (blocks > 0) used += (size_t)snprintf(layout + used, room - used, "t*%d", blocks);
        if (s + 1 == stages) layout[used++] = 'L';
    }
    layout[used] = '\0';
    return json_pack("{s:i, s:s}", "pipeline_model_parallel_size", of->plan->submesh_count,
                     "pipeline_model_parallel_layout", layout);
}

/* Stage s runs layers [parts[s], parts[s + 1]). */
static json_t *deepspeed(const struct trainer_plan *of)
{
    json_t *layers = json_array(), *parts = json_array();
    for (int k = 0; k < of->count; k++) json_array_append_new(layers, json_string(of->module[k].name));
    for (int s = 0, k = 0; s < of->plan->stage_count; s++) {
        json_array_append_new(parts, json_integer(k));
        while (k < of->count && of->module[k].stage == s) k++;
    }
    json_array_append_new(parts, json_integer(of->count));
    return json_pack("{s:i, s:o, s:o}", "num_stages", of->plan->submesh_count, "layers", layers, "parts", parts);
}

/* Refuses a plan that the trainer cannot run at all. */
static enum hapt_status check(const struct trainer_plan *of)
{
    const struct hapt_plan *plan = of->plan;
    const char *name = trainer_name[of->trainer];
    for (int s = 0; s < plan->stage_count; s++) {
        const int submesh = (int)(plan->stage[s].submesh - plan->submesh);
        if (of->trainer == HAPT_TRAINER_TORCHTITAN || submesh == s % plan->submesh_count) continue;
        return hapt_fail(HAPT_ERR_INPUT, "plan with --placement loop, or --loops 1",
                         "%s has no pipeline that goes back and forth", name);
    }
    if (of->trainer == HAPT_TRAINER_DEEPSPEED && plan->stage_count > plan->submesh_count)
        return hapt_fail(HAPT_ERR_INPUT, "plan with --loops 1", "deepspeed runs one stage on each rank");
    for (int k = 0; of->trainer == HAPT_TRAINER_MEGATRON && k < of->count; k++) {
        const bool first = of->module[k].stage == 0, last = of->module[k].stage + 1 == plan->stage_count;
        if (of->module[k].block && !of->module[k].attends)
            return hapt_fail(HAPT_ERR_INPUT, "give a transformer",
                             "megatron's layouts are of transformer layers, but %s has no attention",
                             of->module[k].name);
        if (of->module[k].block || first || last) continue;
        return hapt_fail(
            HAPT_ERR_INPUT, "plan with --recompute all, or other --stages",
            "megatron keeps embeddings in the first stage and the head in the last one, but stage %d has %s",
            of->module[k].stage, of->module[k].name);
    }
    return HAPT_OK;
}

static enum hapt_status write_all(struct trainer_plan *of, const char *folder)
{
    struct emit_output output;
    char name[MOST_NAME];
    name_losses(of);
    HAPT_TRY(hapt_folder_make(folder));
    if (of->trainer == HAPT_TRAINER_TORCHTITAN) {
        HAPT_TRY(emit_output_open(&output, folder, SCHEDULE_FILE));
        HAPT_TRY(emit_output_close(&output, write_schedule(of, output.file)));
    }
    json_t *settings = of->trainer == HAPT_TRAINER_TORCHTITAN ? torchtitan(of)
                       : of->trainer == HAPT_TRAINER_MEGATRON ? megatron(of)
                                                              : deepspeed(of);
    if (!settings) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for the plan of %s", trainer_name[of->trainer]);
    const int rows = of->plan->rows > 0 ? of->plan->rows : of->model->microbatch;
    json_t *json = json_pack("{s:s, s:i, s:s, s:i, s:i, s:O, s:o}", "format", "hapt-emitted-plan", "version", 1,
                             "trainer", trainer_name[of->trainer], "microbatches", of->plan->microbatches,
                             "microbatch_rows", rows, "cannot", of->cannot, "settings", settings);
    if (!json) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for the plan of %s", trainer_name[of->trainer]);
    file_name(of->trainer, name);
    enum hapt_status status = emit_output_open(&output, folder, name);
    if (status == HAPT_OK) {
        const bool written = json_dumpf(json, output.file, JSON_INDENT(2)) == 0 && fputc('\n', output.file) != EOF;
        (void)written; /* the file has the error */
        status = emit_output_close(&output, HAPT_OK);
    }
    json_decref(json);
    return status == HAPT_OK ? hapt_folder_sync(folder) : status;
}

enum hapt_status hapt_trainer_check(const struct hapt_plan *plan, const struct hapt_model *model,
                                    enum hapt_trainer trainer, struct hapt_arena *arena)
{
    struct trainer_plan of = {.plan = plan, .model = model, .trainer = trainer, .arena = arena};
    HAPT_TRY(find_modules(&of));
    return check(&of);
}

enum hapt_status hapt_emit_trainer(const struct hapt_plan *plan, const struct hapt_model *model,
                                   enum hapt_trainer trainer, const char *folder, struct hapt_arena *arena,
                                   const char ***sentences)
{
    struct trainer_plan of = {.plan = plan, .model = model, .trainer = trainer, .arena = arena, .cannot = json_array()};
    enum hapt_status status = of.cannot ? find_modules(&of) : HAPT_ERR_MEMORY;
    if (status == HAPT_OK) status = write_all(&of, folder);
    const size_t count = json_array_size(of.cannot);
    *sentences = hapt_arena_alloc(arena, count + 1, sizeof **sentences);
    if (status == HAPT_OK && !*sentences) status = HAPT_ERR_MEMORY;
    for (size_t k = 0; status == HAPT_OK && k < count; k++) {
        (*sentences)[k] = hapt_arena_strdup(arena, json_string_value(json_array_get(of.cannot, k)));
        if (!(*sentences)[k]) status = HAPT_ERR_MEMORY;
    }
    json_decref(of.cannot);
    return status;
}
