/*
 * Updates of parameters whose optimizer state is on the host, in pieces.
 *
 * If the device updates them, the state passes through a window on the device, piece by piece: while a piece is updated
 * in one half of the window, the next one is copied into the other half, and the one before is copied out of it first.
 * Pieces are in the order in which the next forward pass reads their weights. So an update may be deferred (AutoHete's
 * priority across iterations, its Insight 3): each operator of the next forward pass waits for the pieces of its own
 * weights alone. If the host updates them, a thread does so (engine_host_update.c), and this file waits for its pieces.
 */
#include <limits.h>
#include <math.h>
#include <stdlib.h>

#include "engine_private.h"
#include "hapt/env.h"

#define HOST_PATIENCE_S 1e-3 /* the caller looks for messages in between */

static bool is_whole(const struct hapt_memory_plan *plan)
{
    return plan->window_elements >= plan->state_elements;
}

size_t hapt_engine_window_of(const struct hapt_engine *engine, const struct update_piece *piece, int half)
{
    return is_whole(engine->plan) ? piece->state_first : (size_t)half * (engine->plan->window_elements / 2);
}

enum hapt_status hapt_engine_start_copy(struct hapt_engine *engine, enum state_direction direction, const char *what,
                                        void *to, const void *from, size_t bytes)
{
    const struct hapt_backend *backend = engine->options.backend;
    const int queue = direction == STATE_IN ? HAPT_QUEUE_STATE_IN : HAPT_QUEUE_STATE_OUT;
    if (!engine->shared->host) return HAPT_OK; /* modelled devices hold no values */
    if (engine->away.copying_s[direction] == 0) engine->away.copying_s[direction] = hapt_time_s();
    if (!engine->shared->copies) return backend->copy(backend->queue(engine->options.device, queue), to, from, bytes);
    state_copies_submit(engine->shared->copies, direction, what, to, from, bytes);
    return HAPT_OK;
}

/* Copies that are no longer on their way. Those of a direction follow each other. */
static void log_copy(struct hapt_engine *engine, enum state_direction direction, struct state_move *move)
{
    struct away_update *away = &engine->away;
    if (move->begin_s == 0) return;
    const double begin_s = fmax(move->begin_s, away->copied_s[direction]);
    away->copied_s[direction] = hapt_time_s();
    hapt_span_log_add(engine->shared->log, state_span(direction), begin_s, away->copied_s[direction]);
    move->begin_s = 0;
}

void hapt_engine_end_copies(struct hapt_engine *engine, enum state_direction direction, struct state_move *move)
{
    const struct hapt_backend *backend = engine->options.backend;
    const int queue = direction == STATE_IN ? HAPT_QUEUE_STATE_IN : HAPT_QUEUE_STATE_OUT;
    *move = (struct state_move){.pending = true, .begin_s = engine->away.copying_s[direction]};
    engine->away.copying_s[direction] = 0;
    if (engine->shared->copies)
        move->mark = state_copies_mark(engine->shared->copies, direction);
    else
        move->end = backend->record(backend->queue(engine->options.device, queue));
    if (move->end && backend->done(move->end)) log_copy(engine, direction, move); /* a CPU copies at once */
}

enum hapt_status hapt_engine_wait_copies(struct hapt_engine *engine, enum state_direction direction,
                                         struct state_move *move)
{
    if (!move->pending) return HAPT_OK;
    move->pending = false;
    if (move->end) {
        HAPT_TRY(engine->options.backend->wait(move->end));
        log_copy(engine, direction, move);
        return HAPT_OK;
    }
    state_copies_wait(engine->shared->copies, direction, move->mark);
    return HAPT_OK;
}

/* Starts to copy all that is on the host of a piece to its half of the window, or back; back with the compute copies of
 * weights that are on the host. */
static enum hapt_status start_move(struct hapt_engine *engine, const struct update_piece *piece, int half,
                                   enum state_direction direction)
{
    const struct hapt_memory_plan *plan = engine->plan;
    const bool in = direction == STATE_IN;
    const size_t elements = piece->end - piece->first, at = hapt_engine_window_of(engine, piece, half);
    for (int s = plan->masters_like_state ? -1 : 0; s < plan->state_count; s++) {
        void *window = (float *)(engine->memory + (s < 0 ? plan->master_offset : plan->state_offset[s])) + at,
             *host = hapt_engine_state_address(engine, s, piece->state_first);
        HAPT_TRY(hapt_engine_start_copy(engine, direction, piece->name, in ? window : host, in ? host : window,
                                        elements * sizeof(float)));
    }
    if (plan->host_weights && plan->copy_offset != (size_t)-1 && !in)
        HAPT_TRY(hapt_engine_start_copy(engine, direction, piece->name, hapt_engine_host_weight(engine, piece->first),
                                        engine->memory + plan->copy_offset + at * sizeof(uint16_t),
                                        elements * sizeof(uint16_t)));
    hapt_engine_end_copies(engine, direction, &engine->away.move[half][direction]);
    return HAPT_OK;
}

static enum hapt_status wait_move(struct hapt_engine *engine, int half, enum state_direction direction)
{
    return hapt_engine_wait_copies(engine, direction, &engine->away.move[half][direction]);
}

int hapt_engine_next_piece(const struct hapt_engine *engine, int at)
{
    while (at < engine->away.piece_count && !(engine->away.groups >> engine->away.piece[at].group & 1u)) at++;
    return at;
}

static enum hapt_status fetch(struct hapt_engine *engine, int piece, int half)
{
    if (piece == engine->away.piece_count) return HAPT_OK;
    HAPT_TRY(wait_move(engine, half, STATE_OUT));
    return start_move(engine, &engine->away.piece[piece], half, STATE_IN);
}

enum hapt_status hapt_engine_away_begin(struct hapt_engine *engine, unsigned groups, const struct hapt_update *update)
{
    struct away_update *away = &engine->away;
    HAPT_ASSERT(!away->pending);
    HAPT_TRY(hapt_engine_gradients_arrive(engine));
    away->groups = groups;
    away->update = *update;
    away->half = 0;
    away->next = hapt_engine_next_piece(engine, 0);
    away->pending = away->next < away->piece_count;
    if (!away->host) return fetch(engine, away->next, 0);
    if (away->pending) hapt_engine_begin_host_update(engine);
    return HAPT_OK;
}

static enum hapt_status finish(struct hapt_engine *engine)
{
    engine->away.pending = false;
    for (int half = 0; half < 2; half++) HAPT_TRY(wait_move(engine, half, STATE_OUT));
    if (!engine->away.zeroes) return HAPT_OK;
    engine->away.zeroes = false;
    HAPT_TRY(hapt_engine_run(engine, &engine->zero));
    return hapt_engine_finish(engine);
}

/* Updates the next piece on the device. */
static enum hapt_status advance_here(struct hapt_engine *engine)
{
    struct away_update *away = &engine->away;
    const struct update_piece *piece = &away->piece[away->next];
    const int half = away->half;
    away->next = hapt_engine_next_piece(engine, away->next + 1);
    away->half = !half;
    HAPT_TRY(fetch(engine, away->next, !half));
    HAPT_TRY(wait_move(engine, half, STATE_IN));
    const struct hapt_engine_links *links = &engine->options.links;
    const double start_s = hapt_time_s(), cpu_s = hapt_time_thread_cpu_s();
    HAPT_TRY(hapt_engine_update_run(engine, &away->update, piece->first, piece->end,
                                    hapt_engine_window_of(engine, piece, half), piece->kind));
    HAPT_TRY(hapt_engine_finish(engine));
    away->kernels_s += hapt_time_s() - start_s;
    if (links->updated) links->updated(links->context, hapt_time_thread_cpu_s() - cpu_s);
    return start_move(engine, piece, half, STATE_OUT);
}

/* Waits for the next piece, but not longer than most_s seconds for one that the host updates. */
static enum hapt_status advance(struct hapt_engine *engine, double most_s)
{
    struct away_update *away = &engine->away;
    bool done = true;
    HAPT_ASSERT(away->pending);
    if (away->host) {
        HAPT_TRY(hapt_engine_wait_host_update(engine, away->next, away->half, most_s, &done));
        if (!done) return HAPT_OK;
        away->next = hapt_engine_next_piece(engine, away->next + 1);
        away->half = !away->half;
    } else {
        HAPT_TRY(advance_here(engine));
    }
    return away->next < away->piece_count ? HAPT_OK : finish(engine);
}

enum hapt_status hapt_engine_away_advance(struct hapt_engine *engine)
{
    return advance(engine, INFINITY);
}

/* ---- Deferred updates ---- */

static bool is_sliced(const struct hapt_engine *engine, const struct hapt_parameter_group *group)
{
    int own;
    return engine->plan->sharded_state && hapt_parameter_group_ranks(engine->program->sharding, group->axes, &own) > 1;
}

bool hapt_engine_defers(const struct hapt_engine *engine)
{
    return engine->away.piece_count > 0 && !hapt_memory_has_places(engine->plan);
}

enum hapt_status hapt_engine_defer_update(struct hapt_engine *engine, const struct hapt_update *update)
{
    unsigned sliced = 0, all = (1u << HAPT_PARAMETER_GROUPS) - 1;
    if (!hapt_engine_defers(engine)) return hapt_engine_update_groups(engine, all, update);
    for (int g = 0; g < HAPT_PARAMETER_GROUPS; g++)
        if (is_sliced(engine, &engine->plan->group[g])) sliced |= 1u << g;
    HAPT_TRY(hapt_engine_update_groups(engine, sliced, update));
    return hapt_engine_away_begin(engine, all & ~sliced, update);
}

bool hapt_engine_is_updating(const struct hapt_engine *engine)
{
    return engine->away.pending;
}

void hapt_engine_log_spans(struct hapt_engine *engine, struct hapt_span_log *log)
{
    engine->shared->log = log;
    if (engine->shared->copies) state_copies_log(engine->shared->copies, log);
}

double hapt_engine_update_kernels_s(const struct hapt_engine *engine)
{
    return engine->away.kernels_s;
}

enum hapt_status hapt_engine_continue_update(struct hapt_engine *engine)
{
    return engine->away.pending ? advance(engine, HOST_PATIENCE_S) : HAPT_OK;
}

enum hapt_status hapt_engine_settle(struct hapt_engine *engine)
{
    while (engine->away.pending) HAPT_TRY(hapt_engine_away_advance(engine));
    return HAPT_OK;
}

/* Share of a forward pass before step `next`, by FLOPs. */
static double share_before(const struct hapt_engine *engine, int next)
{
    const double all = engine->away.flops[engine->program->step_count[HAPT_SECTION_FORWARD]];
    return all > 0 ? engine->away.flops[next] / all : 0;
}

enum hapt_status hapt_engine_update_needed(struct hapt_engine *engine, int next, int last)
{
    const struct hapt_engine_links *links = &engine->options.links;
    if (!engine->away.pending || engine->away.piece[engine->away.next].needed > last) return HAPT_OK;
    HAPT_TRY(hapt_engine_finish(engine)); /* what is queued belongs to the pass */
    if (links->leave) links->leave(links->context, share_before(engine, next));
    while (engine->away.pending && engine->away.piece[engine->away.next].needed <= last)
        HAPT_TRY(hapt_engine_away_advance(engine));
    if (links->resume) links->resume(links->context);
    return HAPT_OK;
}

/* ---- The pieces ---- */

/* [program tensor] The first FORWARD step that reads a parameter; INT_MAX: none. */
static enum hapt_status find_needs(const struct hapt_engine *engine, struct hapt_arena *scratch, int **needs)
{
    const struct hapt_program *program = engine->program;
    int *need;
    HAPT_NEW(need, scratch, program->tensor_count);
    for (int t = 0; t < program->tensor_count; t++) need[t] = INT_MAX;
    for (int s = program->step_count[HAPT_SECTION_FORWARD] - 1; s >= 0; s--) {
        const struct hapt_op *op = &program->graph->op[program->step[HAPT_SECTION_FORWARD][s].op];
        for (int i = 0; i < op->input_count; i++)
            if (op->input[i] >= 0 && program->local[op->input[i]] >= 0) need[program->local[op->input[i]]] = s;
    }
    *needs = need;
    return HAPT_OK;
}

/* The first step that reads elements [first, end) of the blocks. */
static int need_of(const struct hapt_engine *engine, const int *needs, size_t first, size_t end)
{
    int least = INT_MAX;
    for (int t = 0; t < engine->program->tensor_count; t++) {
        const size_t at = engine->plan->parameter_element[t];
        if (at == (size_t)-1 || at >= end) continue;
        if (at + hapt_engine_elements(engine, engine->program->tensor[t].tensor) <= first) continue;
        if (needs[t] < least) least = needs[t];
    }
    return least;
}

/* The parameter to which element `first` belongs. */
static const char *name_of(const struct hapt_engine *engine, size_t first)
{
    const char *name = "parameters";
    size_t nearest = 0;
    for (int t = 0; t < engine->program->tensor_count; t++) {
        const size_t at = engine->plan->parameter_element[t];
        if (at == (size_t)-1 || at > first || at < nearest) continue;
        nearest = at;
        name = engine->program->graph->tensor[engine->program->tensor[t].tensor].name;
    }
    return name;
}

/* Adds the pieces of that kind in a group's slice; without pieces it only counts them. */
static void cut(struct hapt_engine *engine, const int *needs, int g, enum update_kind kind)
{
    const struct hapt_memory_plan *plan = engine->plan;
    const struct hapt_parameter_group *group = &plan->group[g];
    const size_t most = is_whole(plan) ? plan->window_elements : plan->window_elements / 2;
    size_t first = update_first(group, kind), end = update_end(group, kind);
    if (first < group->slice_first) first = group->slice_first;
    if (end > group->slice_end) end = group->slice_end;
    for (size_t at = first; at < end; at += most) {
        const size_t behind = end - at < most ? end : at + most;
        struct update_piece *piece = engine->away.piece ? &engine->away.piece[engine->away.piece_count] : NULL;
        engine->away.piece_count++;
        if (!piece) continue;
        *piece = (struct update_piece){.group = g,
                                       .first = at,
                                       .end = behind,
                                       .state_first = group->state_first + at - group->slice_first,
                                       .kind = kind,
                                       .name = name_of(engine, at),
                                       .needed = need_of(engine, needs, at, behind)};
    }
}

static void cut_all(struct hapt_engine *engine, const int *needs)
{
    engine->away.piece_count = 0;
    for (int g = 0; g < HAPT_PARAMETER_GROUPS; g++)
        for (enum update_kind kind = 0; kind < UPDATE_KINDS; kind++) cut(engine, needs, g, kind);
}

static int by_need(const void *first, const void *second)
{
    const struct update_piece *a = first, *b = second;
    if (a->needed != b->needed) return a->needed < b->needed ? -1 : 1;
    return a->first < b->first ? -1 : a->first > b->first;
}

static enum hapt_status sum_flops(struct hapt_engine *engine)
{
    const struct hapt_program *program = engine->program;
    const int count = program->step_count[HAPT_SECTION_FORWARD];
    HAPT_NEW(engine->away.flops, &engine->arena, count + 1);
    for (int s = 0; s < count; s++)
        engine->away.flops[s + 1] =
            engine->away.flops[s] +
            hapt_op_flops(program->graph, &program->graph->op[program->step[HAPT_SECTION_FORWARD][s].op], 1);
    return HAPT_OK;
}

enum hapt_status hapt_engine_bind_away(struct hapt_engine *engine)
{
    struct hapt_arena scratch;
    int *needs;
    if (engine->plan->state_space != HAPT_SPACE_HOST) return HAPT_OK;
    HAPT_TRY(sum_flops(engine));
    hapt_arena_init(&scratch);
    enum hapt_status status = find_needs(engine, &scratch, &needs);
    if (status == HAPT_OK) {
        cut_all(engine, needs); /* counts */
        engine->away.piece =
            hapt_arena_alloc(&engine->arena, (size_t)engine->away.piece_count, sizeof *engine->away.piece);
        if (!engine->away.piece) status = HAPT_ERR_MEMORY;
    }
    if (status == HAPT_OK) {
        cut_all(engine, needs);
        qsort(engine->away.piece, (size_t)engine->away.piece_count, sizeof *engine->away.piece, by_need);
    }
    hapt_arena_release(&scratch);
    if (status != HAPT_OK || !engine->plan->host_update || !engine->shared->host) return status;
    return hapt_engine_bind_host_updates(engine);
}
