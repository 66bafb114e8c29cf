/* Forward passes alone: hapt generate. The logits behind the newest token of each prompt give the next one. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "data.h"
#include "evaluate.h"
#include "hapt/progress.h"
#include "logits.h"
#include "runtime.h"

/* A class and its logit. */
struct choice {
    float logit;
    int32_t class;
};

enum { NOT_MINE = -1, NOT_FINITE = -2 }; /* in place of a chosen token */

struct generator {
    struct worker *worker;
    struct hapt_generation *generation;
    struct logits logits;
    struct hapt_data *data;
    int64_t length;             /* of a row, T */
    int32_t *row;               /* [rows][T + 1] */
    void *logit;                /* [classes] as they are computed */
    struct choice *choice;      /* [classes] */
    int32_t *chosen, *received; /* [prompts] this rank's; [world][prompts] */
};

enum hapt_status hapt_train_may_generate(const struct hapt_model *model)
{
    const struct hapt_graph *graph = model->graph;
    const char *why = hapt_model_input(model, HAPT_ROLE_TOKENS) < 0    ? "it has no tokens"
                      : hapt_model_input(model, HAPT_ROLE_TARGETS) < 0 ? "it has no targets"
                                                                       : NULL;
    bool attends = false;
    for (int op = 0; op < graph->forward_count && !why; op++) {
        const char *type = hapt_op_type_at(graph->op[op].type)->name;
        if (strcmp(type, "attention") != 0 && strcmp(type, "grouped_attention") != 0) continue;
        attends = true;
        if (graph->op[op].integer[1] != 1) why = "its attention also looks ahead";
    }
    if (!why && !attends) why = "it has no attention";
    if (!why) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT, "give a language model: gpt, llama, or an imported decoder",
                     "a model of the family %s cannot continue a text: %s", model->family, why);
}

/* A number in [0, 1) for a token of a prompt. */
static double uniform(const struct generator *generator, int prompt, int64_t token)
{
    const int64_t key[2] = {prompt, token};
    return (double)(hapt_hash(generator->generation->seed, key, sizeof key) >> 11) * 0x1p-53;
}

static int by_logit(const void *a, const void *b)
{
    const struct choice *first = a, *second = b;
    if (first->logit != second->logit) return first->logit > second->logit ? -1 : 1;
    return (first->class > second->class) - (first->class < second->class);
}

/* The class whose part of the summed probabilities holds `share` of all. Choices are in descending order. */
static int32_t draw(const struct generator *generator, int64_t count, double share)
{
    const struct choice *choice = generator->choice;
    const double temperature = generator->generation->temperature;
    double all = 0, sum = 0;
    for (int64_t i = 0; i < count; i++) all += exp(((double)choice[i].logit - choice[0].logit) / temperature);
    for (int64_t i = 0; i < count; i++) {
        sum += exp(((double)choice[i].logit - choice[0].logit) / temperature);
        if (sum > share * all) return choice[i].class;
    }
    return choice[count - 1].class;
}

/* Chooses a class by the logits in generator->logit. */
static int32_t choose(const struct generator *generator, int prompt, int64_t token)
{
    const struct hapt_generation *generation = generator->generation;
    const int64_t classes = generator->logits.classes;
    int64_t best = 0;
    for (int64_t i = 0; i < classes; i++) {
        const float value = logits_value(generator->logit, generator->logits.dtype, i);
        if (!isfinite(value)) return NOT_FINITE;
        generator->choice[i] = (struct choice){value, (int32_t)i};
        if (value > generator->choice[best].logit) best = i;
    }
    if (generation->temperature == 0) return (int32_t)best;
    qsort(generator->choice, (size_t)classes, sizeof *generator->choice, by_logit);
    const int64_t count = generation->top_k > 0 && generation->top_k < classes ? generation->top_k : classes;
    return draw(generator, count, uniform(generator, prompt, token));
}

/* The place of a global index among those that a rank holds; -1: it does not. */
static int64_t place_of(const struct hapt_box *box, int dim, int64_t index)
{
    int64_t before = 0;
    for (int r = 0; r < box->runs[dim]; r++) {
        const struct hapt_box_run *run = &box->run[dim][r];
        if (index >= run->start && index < run->start + run->count) return before + index - run->start;
        before += run->count;
    }
    return -1;
}

/* The position of a prompt's newest token in its row. */
static int64_t newest(const struct generator *generator, const struct hapt_prompt *prompt)
{
    return (prompt->count < generator->length ? prompt->count : generator->length) - 1;
}

/* A worker_observer: chooses the next token of each prompt of the microbatch that this rank answers for. */
static enum hapt_status choose_tokens(void *context, struct stage *stage, int microbatch, int slot)
{
    struct generator *generator = context;
    struct worker *worker = generator->worker;
    const int each = worker->model->microbatch, first = microbatch * each;
    const size_t row_bytes = (size_t)generator->logits.classes * hapt_dtype_bytes(generator->logits.dtype);
    const char *logits = hapt_engine_tensor(stage->engine, generator->logits.tensor, slot);
    struct hapt_box box;
    if (!generator->logits.counts) return HAPT_OK;
    stage_box(worker, stage->chunk, stage->rank, generator->logits.tensor, &box);
    HAPT_ASSERT(box.dims == 3); /* [rows][T][classes] */
    for (int p = first; p < first + each && p < generator->generation->prompts; p++) {
        const struct hapt_prompt *prompt = &generator->generation->prompt[p];
        const int64_t row = place_of(&box, 0, p - first), token = place_of(&box, 1, newest(generator, prompt));
        if (prompt->ended || row < 0 || token < 0) continue;
        HAPT_TRY(worker_copy(worker, generator->logit, logits + (size_t)(row * box.extent[1] + token) * row_bytes,
                             row_bytes));
        generator->chosen[p] = choose(generator, p, prompt->count - prompt->given);
    }
    return HAPT_OK;
}

/* Every row holds the last T tokens of a prompt. */
static void fill_rows(struct generator *generator)
{
    for (int p = 0; p < generator->generation->prompts; p++) {
        const struct hapt_prompt *prompt = &generator->generation->prompt[p];
        const int64_t count = newest(generator, prompt) + 1;
        memcpy(generator->row + p * (generator->length + 1), prompt->token + prompt->count - count,
               (size_t)count * sizeof *prompt->token);
        generator->chosen[p] = NOT_MINE;
    }
}

/* Appends what the ranks have chosen. */
static enum hapt_status append(struct generator *generator)
{
    struct hapt_generation *generation = generator->generation;
    for (int p = 0; p < generation->prompts; p++) {
        struct hapt_prompt *prompt = &generation->prompt[p];
        int32_t chosen = NOT_MINE;
        for (int r = 0; r < generator->worker->env->world_size; r++) {
            const int32_t its = generator->received[r * generation->prompts + p];
            if (its != NOT_MINE) chosen = its;
        }
        if (prompt->ended) continue;
        if (chosen == NOT_FINITE)
            return hapt_fail(HAPT_ERR_INPUT, "look for weights that are too large; --precision fp32 has more range",
                             "prompt %d: logits behind token %lld are not finite", p, (long long)prompt->count - 1);
        HAPT_ASSERT(chosen >= 0);
        prompt->token[prompt->count++] = chosen;
        prompt->ended = chosen == generation->end;
    }
    return HAPT_OK;
}

static bool all_ended(const struct hapt_generation *generation)
{
    bool all = true;
    for (int p = 0; p < generation->prompts; p++) all = all && generation->prompt[p].ended;
    return all;
}

/* A rank that fails in a pass ends the job: others wait for its messages. */
static enum hapt_status generate_all(struct generator *generator)
{
    struct worker *worker = generator->worker;
    struct hapt_generation *generation = generator->generation;
    const int each = worker->model->microbatch;
    const size_t bytes = (size_t)generation->prompts * sizeof *generator->chosen;
    enum hapt_status status = HAPT_OK;
    struct hapt_progress progress;
    hapt_progress_init(&progress, worker->env, "generating", (long)generation->most);
    worker->observer = (struct worker_observer){choose_tokens, generator};
    for (int64_t k = 0; k < generation->most && status == HAPT_OK && !all_ended(generation); k++) {
        fill_rows(generator);
        status = worker_run_forward(worker, generator->data, 0, (generation->prompts + each - 1) / each);
        if (status == HAPT_OK)
            status = hapt_link_all_gather(worker->env->world, "a token", worker_agreement_timeout_s(worker),
                                          generator->chosen, bytes, generator->received);
        if (status != HAPT_OK) hapt_die(status);
        status = append(generator); /* the same on all ranks */
        hapt_progress_update(&progress, (long)(k + 1), NULL);
    }
    worker->observer = (struct worker_observer){0};
    hapt_progress_release(&progress);
    return status;
}

static enum hapt_status reserve(struct generator *generator)
{
    struct worker *worker = generator->worker;
    const struct hapt_model *model = worker->model;
    const int rows = worker->plan->microbatches * model->microbatch, prompts = generator->generation->prompts;
    bool known;
    logits_find(worker, &generator->logits, &known);
    if (!known)
        return hapt_fail(HAPT_ERR_INPUT, "give another --plan, without tensor-parallel last stage",
                         "this plan splits the vocabulary over devices, so no device has all logits of a token");
    if (prompts > rows)
        return hapt_fail(HAPT_ERR_USAGE, "give fewer prompts, or a plan of more microbatches",
                         "%d prompts are more than the %d rows of a step", prompts, rows);
    generator->length = model->graph->tensor[hapt_model_input(model, HAPT_ROLE_TOKENS)].shape[1];
    HAPT_TRY(data_of_rows(rows, generator->length, &generator->data, &generator->row));
    HAPT_NEW(generator->chosen, worker->arena, prompts);
    HAPT_NEW(generator->received, worker->arena, (size_t)prompts * (size_t)worker->env->world_size);
    if (!generator->logits.counts) return HAPT_OK;
    generator->logit = hapt_arena_alloc(worker->arena, (size_t)generator->logits.classes, sizeof(float));
    if (!generator->logit) return HAPT_ERR_MEMORY;
    HAPT_NEW(generator->choice, worker->arena, generator->logits.classes);
    return HAPT_OK;
}

static enum hapt_status generate(struct generator *generator, const struct hapt_checkpoint *checkpoint,
                                 const struct hapt_config *config, bool *together)
{
    struct worker *worker = generator->worker;
    HAPT_TRY(evaluate_build(worker, config));
    HAPT_TRY(hapt_env_agree(worker->env->world, reserve(generator)));
    HAPT_TRY(evaluate_join(worker, config, checkpoint, together));
    const enum hapt_status status = generate_all(generator), drained = worker_drain(worker);
    if (drained != HAPT_OK) hapt_die(drained);
    return hapt_env_agree(worker->env->world, status);
}

enum hapt_status hapt_train_generate(const struct hapt_env *env, const struct hapt_cluster *cluster,
                                     const struct hapt_model *model, const struct hapt_plan *plan,
                                     const struct hapt_checkpoint *checkpoint, const struct hapt_config *config,
                                     struct hapt_arena *arena, struct hapt_generation *generation)
{
    struct worker worker = {.env = env,
                            .cluster = cluster,
                            .runtime = runtime_of(cluster),
                            .model = model,
                            .plan = plan,
                            .arena = arena,
                            .comm = MPI_COMM_NULL};
    struct generator generator = {.worker = &worker, .generation = generation};
    bool together = false;
    const enum hapt_status status = generate(&generator, checkpoint, config, &together);
    if (status == HAPT_ERR_COMM && !together) hapt_die(status); /* as in hapt_train_run */
    worker_release(&worker);
    hapt_data_close(generator.data);
    return status;
}
