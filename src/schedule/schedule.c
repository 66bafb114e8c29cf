/* Pipeline schedules as instruction lists: launch counts (HAPT (1), (2)), then the phases of building the lists. */
#include "check.h"
#include "order.h"

#include <stdint.h>
#include <string.h>

static const char *const kind_names[] = {"gpipe",       "1f1b",          "eager1f1b", "h1f1b",
                                         "interleaved", "breadth-first", "looped"};

const char *hapt_schedule_kind_name(enum hapt_schedule_kind kind)
{
    return kind_names[kind];
}

bool hapt_schedule_kind_parse(const char *name, enum hapt_schedule_kind *kind)
{
    for (int k = 0; k < HAPT_SCHEDULE_KINDS; k++) {
        if (strcmp(name, kind_names[k]) == 0) {
            *kind = (enum hapt_schedule_kind)k;
            return true;
        }
    }
    return false;
}

int hapt_schedule_delta(enum hapt_schedule_kind kind, double comm_s, double t_max_s, double hide_threshold)
{
    switch (kind) {
    case HAPT_SCHEDULE_GPIPE: return 0;
    case HAPT_SCHEDULE_1F1B: return 1;
    case HAPT_SCHEDULE_EAGER: return 2;
    default: break;
    }
    if (hapt_at_most(comm_s, hide_threshold * t_max_s)) return 1;
    return hapt_at_most(comm_s, 0.5 * t_max_s) ? 2 : 3;
}

void hapt_schedule_warmup(enum hapt_schedule_kind kind, int stages, int microbatches, const double *comm_s,
                          double t_max_s, double hide_threshold, int *warmup)
{
    warmup[stages - 1] = kind == HAPT_SCHEDULE_GPIPE ? microbatches : 1;
    for (int stage = stages - 2; stage >= 0; stage--) {
        const int more = hapt_schedule_delta(kind, comm_s[stage], t_max_s, hide_threshold);
        warmup[stage] = warmup[stage + 1] + more < microbatches ? warmup[stage + 1] + more : microbatches;
    }
}

int hapt_schedule_forward_only_launches(enum hapt_schedule_kind kind, int microbatches, double comm_s, double t_max_s,
                                        double hide_threshold)
{
    const bool hides = kind == HAPT_SCHEDULE_H1F1B;
    const int launches = hides ? hapt_schedule_delta(kind, comm_s, t_max_s, hide_threshold) : 2;
    return launches < microbatches ? launches : microbatches;
}

/* ---- Building ---- */

/* Numbers the submeshes and copies what the caller may release. */
static enum hapt_status place_chunks(struct hapt_schedule *schedule, const struct hapt_schedule_options *options,
                                     struct hapt_arena *arena)
{
    const int chunks = schedule->chunk_count;
    HAPT_NEW(schedule->submesh_of, arena, chunks);
    HAPT_NEW(schedule->forward_only, arena, chunks);
    for (int c = 0; c < chunks; c++) {
        const int submesh = options->submesh_of ? options->submesh_of[c] : c;
        HAPT_ASSERT(submesh >= 0 && submesh <= schedule->submesh_count);
        schedule->submesh_of[c] = submesh;
        if (submesh == schedule->submesh_count) schedule->submesh_count++;
        schedule->forward_only[c] = options->forward_only && options->forward_only[c];
        HAPT_ASSERT(!schedule->forward_only[c] || (c < chunks - 1 && (c == 0 || schedule->forward_only[c - 1])));
    }
    HAPT_NEW(schedule->list, arena, schedule->submesh_count);
    return hapt_schedule_connect(schedule, options, arena);
}

static enum hapt_status launch_chunks(struct hapt_schedule *schedule, const int *warmup, struct hapt_arena *arena)
{
    const int chunks = schedule->chunk_count, B = schedule->microbatches;
    const bool loops = hapt_schedule_loops(schedule->kind);
    HAPT_NEW(schedule->launches, arena, chunks);
    for (int c = 0; c < chunks; c++) {
        schedule->launches[c] = loops && !(warmup && schedule->forward_only[c]) ? 2 : warmup[c];
        if (loops && schedule->launches[c] > B) schedule->launches[c] = B;
        const bool falls = loops || schedule->forward_only[c] || c == chunks - 1 || warmup[c] >= warmup[c + 1];
        if (schedule->launches[c] < 1 || schedule->launches[c] > B || !falls)
            return hapt_fail(HAPT_ERR_INPUT,
                             "launch counts must lie in [1, microbatches] and must not rise along the pipeline",
                             "stage %d cannot launch %d of %d microbatches", c, schedule->launches[c], B);
    }
    return HAPT_OK;
}

/* The most microbatches of a chunk in flight, which follow from a looped order. */
static enum hapt_status count_launches(struct hapt_schedule *schedule, const struct pass_list *order,
                                       struct hapt_arena *arena)
{
    int *open;
    HAPT_NEW(open, arena, schedule->chunk_count);
    for (int c = 0; c < schedule->chunk_count; c++)
        if (!schedule->forward_only[c]) schedule->launches[c] = 1;
    for (int s = 0; s < schedule->submesh_count; s++)
        for (int i = 0; i < order[s].count; i++) {
            const int c = order[s].pass[i].chunk;
            open[c] += order[s].pass[i].kind == HAPT_INSTRUCTION_FORWARD;
            open[c] -= order[s].pass[i].kind == HAPT_INSTRUCTION_BACKWARD;
            if (open[c] > schedule->launches[c] && !schedule->forward_only[c]) schedule->launches[c] = open[c];
        }
    return HAPT_OK;
}

int hapt_schedule_loop_batch(enum hapt_schedule_kind kind, int microbatches, int submeshes, int asked)
{
    if (kind == HAPT_SCHEDULE_BREADTH_FIRST || !hapt_schedule_loops(kind)) return microbatches;
    if (asked > 0) return asked;
    return kind == HAPT_SCHEDULE_INTERLEAVED && submeshes < microbatches ? submeshes : microbatches;
}

/* The visits of a submesh in one microbatch: runs of neighbouring chunks. Only trained chunks count. */
struct visits {
    int chunks, in_last; /* of all visits; of the last one */
    int rest;            /* visits of any submesh from its last one to the end of the pipeline */
};

static struct visits find_visits(const struct hapt_schedule *schedule, int submesh)
{
    struct visits visits = {0};
    for (int c = 0; c < schedule->chunk_count; c++) {
        const bool begins = c == 0 || schedule->submesh_of[c] != schedule->submesh_of[c - 1];
        if (schedule->submesh_of[c] == submesh) {
            if (begins) visits.in_last = 0;
            visits.rest = 1;
            visits.chunks += !schedule->forward_only[c];
            visits.in_last += !schedule->forward_only[c];
        } else {
            visits.rest += begins;
        }
    }
    return visits;
}

/* Forwards before the first backward of each submesh: the formula of hapt_schedule_build. */
static void find_ahead(const struct hapt_schedule *schedule, int loop_batch, int *ahead)
{
    const struct hapt_schedule_options *options = &schedule->options;
    const enum hapt_schedule_kind kind = schedule->kind;
    const int64_t B = schedule->microbatches;
    int most = 0;
    for (int s = 0; s < schedule->submesh_count; s++) {
        const int chunks = find_visits(schedule, s).chunks;
        if (chunks > most) most = chunks;
    }
    for (int s = 0; s < schedule->submesh_count; s++) {
        const struct visits visits = find_visits(schedule, s);
        int more = kind == HAPT_SCHEDULE_INTERLEAVED ? visits.rest : options->prefetch;
        if (more > visits.rest - 1) more = visits.rest - 1;
        int64_t count =
            (int64_t)(visits.chunks - visits.in_last) * loop_batch + (int64_t)visits.in_last * (visits.rest + more);
        /* behind a frozen prefix, other submeshes have more passes of the group to run before the next group arrives
         * here */
        if (schedule->forward_only[0] && visits.chunks < most && count > (int64_t)visits.chunks * loop_batch)
            count = (int64_t)visits.chunks * loop_batch;
        for (int c = 0; !hapt_schedule_loops(kind) && c < schedule->chunk_count; c++)
            if (schedule->submesh_of[c] == s) count = schedule->launches[c]; /* its only chunk */
        if (kind == HAPT_SCHEDULE_BREADTH_FIRST) count = visits.chunks * B;
        if (options->ahead) count = options->ahead[s];
        ahead[s] = (int)(count < visits.chunks * B ? count : visits.chunks * B);
    }
}

/* A submesh that waits for gradients for ever needs more forwards before them. Gives each of these `by` more; false:
 * none can have more. */
static bool raise_ahead(const struct hapt_schedule *schedule, const int *at, int by, int *ahead)
{
    bool raised = false;
    for (int s = 0; s < schedule->submesh_count; s++) {
        const struct hapt_instruction_list *list = &schedule->list[s];
        const int64_t all = (int64_t)find_visits(schedule, s).chunks * schedule->microbatches;
        if (at[s] == list->count || ahead[s] >= all) continue;
        const enum hapt_instruction_kind kind = list->instruction[at[s]].kind;
        if (kind != HAPT_INSTRUCTION_RECEIVE_BACKWARD && kind != HAPT_INSTRUCTION_BACKWARD) continue;
        ahead[s] = all - ahead[s] < by ? (int)all : ahead[s] + by;
        raised = true;
    }
    return raised;
}

/* Single steps of `ahead`; then they double, so that lists which never end are given up soon. */
enum { SINGLE_STEPS = 64 };

/* The looped order with the least `ahead`, from the formula on, that ends, and its unsplit lists in `scratch`. Loops
 * around all submeshes need no more than the formula; other placements, such as a V, may. */
static enum hapt_status order_looped(struct hapt_schedule *schedule, int loop_batch, bool tied, int *ahead,
                                     struct pass_list *order, struct hapt_arena *scratch)
{
    const bool split = schedule->split;
    bool ends = false, raised = true;
    schedule->split = false; /* WEIGHT instructions wait for nothing */
    for (int step = 0, by = 1; !ends && raised; step++, by *= step > SINGLE_STEPS ? 2 : 1) {
        int *at;
        hapt_arena_reset(scratch);
        HAPT_NEW(at, scratch, schedule->submesh_count);
        for (int s = 0; s < schedule->submesh_count; s++) order[s].count = 0;
        order_passes(schedule, loop_batch, ahead, order);
        HAPT_TRY(make_lists(schedule, order, tied, scratch));
        HAPT_TRY(check_play(schedule, at, &ends));
        raised = !ends && !schedule->options.ahead && raise_ahead(schedule, at, by, ahead);
    }
    schedule->split = split;
    return ends ? HAPT_OK : check_deadlock(schedule);
}

/* True if the lists of the order end. */
static enum hapt_status try_order(struct hapt_schedule *schedule, struct pass_list *order, bool *ends)
{
    const bool split = schedule->split;
    struct hapt_arena scratch;
    int *at;
    hapt_arena_init(&scratch);
    schedule->split = false; /* WEIGHT instructions wait for nothing */
    at = hapt_arena_alloc(&scratch, (size_t)schedule->submesh_count, sizeof *at);
    enum hapt_status status = at ? make_lists(schedule, order, false, &scratch) : HAPT_ERR_MEMORY;
    if (status == HAPT_OK) status = check_play(schedule, at, ends);
    hapt_arena_release(&scratch);
    schedule->split = split;
    for (int s = 0; s < schedule->submesh_count; s++) schedule->list[s] = (struct hapt_instruction_list){0};
    return status;
}

/* The order of kinds with launch counts. If messages past the next chunk need more transfer slots than there are, the
 * largest launch counts are lowered until the lists end. */
static enum hapt_status order_launches(struct hapt_schedule *schedule, int *ahead, struct pass_list *order)
{
    bool ends = true;
    int most = 1;
    for (int c = 0; c < schedule->chunk_count; c++)
        if (schedule->launches[c] > most) most = schedule->launches[c];
    for (; most > 0; most--) {
        for (int c = 0; c < schedule->chunk_count; c++)
            if (schedule->launches[c] > most) schedule->launches[c] = most;
        for (int s = 0; s < schedule->submesh_count; s++) order[s].count = 0;
        find_ahead(schedule, schedule->microbatches, ahead);
        ends = true;
        if (schedule->submesh_count < schedule->chunk_count)
            HAPT_TRY(merge_passes(schedule, order, &ends));
        else
            order_passes(schedule, schedule->microbatches, ahead, order);
        if (ends && schedule->edges.given) HAPT_TRY(try_order(schedule, order, &ends));
        if (ends || !schedule->edges.given) break;
    }
    return ends ? HAPT_OK : check_deadlock(schedule);
}

/* *made: the lists of the order are made, too. */
static enum hapt_status order_chunks(struct hapt_schedule *schedule, const int *warmup, bool tied,
                                     struct pass_list *order, struct hapt_arena *arena, bool *made)
{
    const int B = schedule->microbatches;
    const int loop_batch =
        hapt_schedule_loop_batch(schedule->kind, B, schedule->submesh_count, schedule->options.loop_batch);
    int *ahead;
    if (B % loop_batch != 0)
        return hapt_fail(HAPT_ERR_INPUT, "choose a loop batch that divides the number of microbatches",
                         "%d microbatches cannot be divided into groups of %d", B, loop_batch);
    HAPT_TRY(launch_chunks(schedule, warmup, arena));
    HAPT_NEW(ahead, arena, schedule->submesh_count);
    if (!hapt_schedule_loops(schedule->kind)) return order_launches(schedule, ahead, order);
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    find_ahead(schedule, loop_batch, ahead);
    const enum hapt_status status = order_looped(schedule, loop_batch, tied, ahead, order, &scratch);
    *made = status == HAPT_OK && !schedule->split;
    if (*made) {
        hapt_arena_adopt(arena, &scratch);
    } else {
        for (int s = 0; s < schedule->submesh_count; s++) schedule->list[s] = (struct hapt_instruction_list){0};
        hapt_arena_release(&scratch);
    }
    return status == HAPT_OK ? count_launches(schedule, order, arena) : status;
}

static enum hapt_status build_lists(struct hapt_schedule *schedule, const int *warmup, struct hapt_arena *arena)
{
    const bool tied = schedule->options.tied && schedule->chunk_count > 1;
    struct pass_list *order;
    bool made = false;
    HAPT_NEW(order, arena, schedule->submesh_count);
    for (int s = 0; s < schedule->submesh_count; s++) {
        int64_t chunks = 0;
        for (int c = 0; c < schedule->chunk_count; c++) chunks += schedule->submesh_of[c] == s;
        HAPT_NEW(order[s].pass, arena, chunks * schedule->microbatches * (schedule->split ? 3 : 2));
    }
    HAPT_TRY(order_chunks(schedule, warmup, tied, order, arena, &made));
    if (schedule->split) HAPT_TRY(place_weights(schedule, schedule->options.costs, order));
    return made ? HAPT_OK : make_lists(schedule, order, tied, arena);
}

/* Keeps the options for hapt_schedule_resize. The arrays that it reads are copied. */
static enum hapt_status keep_options(struct hapt_schedule *schedule, const struct hapt_schedule_options *options,
                                     struct hapt_arena *arena)
{
    struct hapt_schedule_options *kept = &schedule->options;
    const int submeshes = schedule->submesh_count;
    int *copy[3];
    const int *const from[3] = {options->ahead, options->pool, options->weight_slots};
    *kept = *options;
    kept->submesh_of = schedule->submesh_of;
    kept->forward_only = schedule->forward_only;
    kept->edge_count = schedule->edges.count;
    kept->edge = schedule->edges.edge;
    if (kept->relay_count > 0) {
        struct hapt_schedule_relay *relay;
        HAPT_NEW(relay, arena, kept->relay_count);
        memcpy(relay, options->relay, (size_t)kept->relay_count * sizeof *relay);
        kept->relay = relay;
    }
    for (int k = 0; k < 3; k++) {
        copy[k] = NULL;
        if (!from[k]) continue;
        HAPT_NEW(copy[k], arena, submeshes);
        memcpy(copy[k], from[k], (size_t)submeshes * sizeof(int));
    }
    kept->ahead = copy[0];
    kept->pool = copy[1];
    kept->weight_slots = copy[2];
    return HAPT_OK;
}

enum hapt_status hapt_schedule_build(enum hapt_schedule_kind kind, int chunks, int microbatches, const int *warmup,
                                     const struct hapt_schedule_options *options, struct hapt_arena *arena,
                                     struct hapt_schedule **schedule)
{
    const struct hapt_schedule_options none = {0};
    if (!options) options = &none;
    HAPT_ASSERT(chunks >= 1 && microbatches >= 1 && (warmup || hapt_schedule_loops(kind)));
    HAPT_ASSERT(!options->split || options->costs);
    struct hapt_schedule *built;
    HAPT_NEW(built, arena, 1);
    *built = (struct hapt_schedule){
        .kind = kind,
        .microbatches = microbatches,
        .chunk_count = chunks,
        .split = options->split,
        .update_groups = options->update_groups > 0 ? options->update_groups : 1,
        .transfer_slots = options->transfer_slots,
    };
    HAPT_NEW(built->idle.instruction, arena, 1);
    built->idle.count = 1;
    built->idle.instruction[0] =
        (struct hapt_instruction){.kind = HAPT_INSTRUCTION_NORM, .chunk = -1, .microbatch = -1, .slot = -1};
    HAPT_TRY(place_chunks(built, options, arena));
    HAPT_TRY(keep_options(built, options, arena));
    HAPT_TRY(build_lists(built, warmup, arena));
    *schedule = built;
    return HAPT_OK;
}

enum hapt_status hapt_schedule_resize(const struct hapt_schedule *schedule, int microbatches,
                                      const struct hapt_costs *costs, struct hapt_arena *arena,
                                      struct hapt_schedule **resized)
{
    struct hapt_schedule_options options = schedule->options;
    int *launches;
    options.tied = false;
    options.update_groups = 0;
    options.costs = costs;
    HAPT_NEW(launches, arena, schedule->chunk_count);
    for (int c = 0; c < schedule->chunk_count; c++)
        launches[c] = schedule->launches[c] < microbatches ? schedule->launches[c] : microbatches;
    return hapt_schedule_build(schedule->kind, schedule->chunk_count, microbatches, launches, &options, arena, resized);
}
