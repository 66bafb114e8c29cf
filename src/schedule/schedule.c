/* Pipeline schedules as instruction lists: launch counts (HAPT (1), (2)), then the order of a step. */
#include "merge.h"

#include <string.h>

static const char *const kind_names[] = {"gpipe", "1f1b", "eager1f1b", "h1f1b"};

const char *hapt_schedule_kind_name(enum hapt_schedule_kind kind)
{
    return kind_names[kind];
}

bool hapt_schedule_kind_parse(const char *name, enum hapt_schedule_kind *kind)
{
    for (int k = 0; k < (int)(sizeof kind_names / sizeof kind_names[0]); k++) {
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
    case HAPT_SCHEDULE_H1F1B: break;
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

/* ---- The list of one chunk ---- */

static void append(struct hapt_instruction_list *list, enum hapt_instruction_kind kind, int chunk, int microbatch)
{
    list->instruction[list->count++] = (struct hapt_instruction){
        .kind = kind,
        .step = 0,
        .chunk = chunk,
        .microbatch = microbatch,
        .slot = microbatch < 0 ? -1 : microbatch % list->slots,
    };
}

static void append_forward(const struct hapt_schedule *schedule, struct hapt_instruction_list *list, int chunk,
                           int microbatch)
{
    if (hapt_schedule_crosses(schedule, chunk - 1)) append(list, HAPT_INSTRUCTION_RECEIVE_FORWARD, chunk, microbatch);
    append(list, HAPT_INSTRUCTION_FORWARD, chunk, microbatch);
    if (hapt_schedule_crosses(schedule, chunk)) append(list, HAPT_INSTRUCTION_SEND_FORWARD, chunk, microbatch);
}

static void append_backward(const struct hapt_schedule *schedule, struct hapt_instruction_list *list, int chunk,
                            int microbatch)
{
    if (hapt_schedule_crosses(schedule, chunk)) append(list, HAPT_INSTRUCTION_RECEIVE_BACKWARD, chunk, microbatch);
    append(list, HAPT_INSTRUCTION_BACKWARD, chunk, microbatch);
    if (hapt_schedule_crosses(schedule, chunk - 1)) append(list, HAPT_INSTRUCTION_SEND_BACKWARD, chunk, microbatch);
}

/* One rule makes all four schedules: `launches` forwards, then a backward and a forward in turn. GPipe: launches = B.
 */
static enum hapt_status build_list(const struct hapt_schedule *schedule, int chunk, struct hapt_arena *arena,
                                   struct hapt_instruction_list *list)
{
    const int B = schedule->microbatches, launches = schedule->launches[chunk];
    HAPT_NEW(list->instruction, arena, 6 * (size_t)B);
    list->slots = launches;
    for (int microbatch = 0; microbatch < launches; microbatch++) append_forward(schedule, list, chunk, microbatch);
    for (int microbatch = 0; microbatch < B; microbatch++) {
        append_backward(schedule, list, chunk, microbatch);
        if (microbatch + launches < B) append_forward(schedule, list, chunk, microbatch + launches);
    }
    return HAPT_OK;
}

/* ---- The lists of the submeshes ---- */

/* The instructions of a submesh behind all passes. */
static void append_end(const struct hapt_schedule *schedule, int submesh, bool tied, struct hapt_instruction_list *list)
{
    for (int chunk = 0; chunk < schedule->chunk_count; chunk++)
        if (schedule->submesh_of[chunk] == submesh) append(list, HAPT_INSTRUCTION_REDUCE, chunk, -1);
    if (tied) append(list, HAPT_INSTRUCTION_EXCHANGE, -1, -1);
    append(list, HAPT_INSTRUCTION_NORM, -1, -1);
    for (int chunk = 0; chunk < schedule->chunk_count; chunk++)
        for (int group = 0; schedule->submesh_of[chunk] == submesh && group < schedule->update_groups; group++) {
            append(list, HAPT_INSTRUCTION_UPDATE, chunk, -1);
            list->instruction[list->count - 1].group = group;
        }
}

static enum hapt_status build_lists(struct hapt_schedule *schedule, bool tied, struct hapt_arena *arena)
{
    struct hapt_instruction_list *part;
    HAPT_NEW(part, arena, schedule->chunk_count);
    for (int chunk = 0; chunk < schedule->chunk_count; chunk++)
        HAPT_TRY(build_list(schedule, chunk, arena, &part[chunk]));
    for (int submesh = 0; submesh < schedule->submesh_count; submesh++) {
        struct hapt_instruction_list *list = &schedule->list[submesh];
        int passes = 0, ends = 2;
        for (int chunk = 0; chunk < schedule->chunk_count; chunk++) {
            if (schedule->submesh_of[chunk] != submesh) continue;
            passes += part[chunk].count;
            ends += 1 + schedule->update_groups;
            list->slots += part[chunk].slots;
        }
        HAPT_NEW(list->instruction, arena, (size_t)passes + (size_t)ends);
    }
    HAPT_TRY(schedule_merge(schedule, part));
    for (int submesh = 0; submesh < schedule->submesh_count; submesh++)
        append_end(schedule, submesh, tied, &schedule->list[submesh]);
    return HAPT_OK;
}

static enum hapt_status place_chunks(struct hapt_schedule *schedule, const struct hapt_schedule_options *options,
                                     const int *warmup, struct hapt_arena *arena)
{
    const int chunks = schedule->chunk_count, B = schedule->microbatches;
    HAPT_NEW(schedule->submesh_of, arena, chunks);
    HAPT_NEW(schedule->launches, arena, chunks);
    for (int chunk = 0; chunk < chunks; chunk++) {
        const bool falls = chunk == chunks - 1 || warmup[chunk] >= warmup[chunk + 1];
        if (warmup[chunk] < 1 || warmup[chunk] > B || !falls)
            return hapt_fail(HAPT_ERR_INPUT,
                             "launch counts must lie in [1, microbatches] and must not rise along the pipeline",
                             "stage %d cannot launch %d of %d microbatches", chunk, warmup[chunk], B);
        const int submesh = options && options->submesh_of ? options->submesh_of[chunk] : chunk;
        HAPT_ASSERT(submesh >= 0 && submesh <= schedule->submesh_count);
        schedule->submesh_of[chunk] = submesh;
        schedule->launches[chunk] = warmup[chunk];
        if (submesh == schedule->submesh_count) schedule->submesh_count++;
    }
    HAPT_NEW(schedule->list, arena, schedule->submesh_count);
    return HAPT_OK;
}

enum hapt_status hapt_schedule_build(enum hapt_schedule_kind kind, int chunks, int microbatches, const int *warmup,
                                     const struct hapt_schedule_options *options, struct hapt_arena *arena,
                                     struct hapt_schedule **schedule)
{
    HAPT_ASSERT(chunks >= 1 && microbatches >= 1);
    struct hapt_schedule *built;
    HAPT_NEW(built, arena, 1);
    *built = (struct hapt_schedule){
        .kind = kind,
        .microbatches = microbatches,
        .chunk_count = chunks,
        .update_groups = options && options->update_groups > 0 ? options->update_groups : 1,
    };
    HAPT_NEW(built->idle.instruction, arena, 1);
    append(&built->idle, HAPT_INSTRUCTION_NORM, -1, -1);
    HAPT_TRY(place_chunks(built, options, warmup, arena));
    HAPT_TRY(build_lists(built, options && options->tied && chunks > 1, arena));
    *schedule = built;
    return HAPT_OK;
}
