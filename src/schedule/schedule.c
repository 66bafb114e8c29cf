/* Pipeline schedules as instruction lists: launch counts (HAPT (1), (2)), then the order of a step. */
#include "hapt/schedule.h"

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

static void append_forward(struct hapt_instruction_list *list, int chunk, int stages, int microbatch)
{
    if (chunk > 0) append(list, HAPT_INSTRUCTION_RECEIVE_FORWARD, chunk, microbatch);
    append(list, HAPT_INSTRUCTION_FORWARD, chunk, microbatch);
    if (chunk < stages - 1) append(list, HAPT_INSTRUCTION_SEND_FORWARD, chunk, microbatch);
}

static void append_backward(struct hapt_instruction_list *list, int chunk, int stages, int microbatch)
{
    if (chunk < stages - 1) append(list, HAPT_INSTRUCTION_RECEIVE_BACKWARD, chunk, microbatch);
    append(list, HAPT_INSTRUCTION_BACKWARD, chunk, microbatch);
    if (chunk > 0) append(list, HAPT_INSTRUCTION_SEND_BACKWARD, chunk, microbatch);
}

/* One rule makes all four schedules: `ahead` forwards, then a backward and a forward in turn. GPipe: ahead = B. */
static enum hapt_status build_list(int chunk, int stages, int microbatches, int ahead, bool tied, int groups,
                                   struct hapt_arena *arena, struct hapt_instruction_list *list)
{
    HAPT_NEW(list->instruction, arena, 6 * (size_t)microbatches + 3 + (size_t)groups);
    list->slots = ahead;
    for (int microbatch = 0; microbatch < ahead; microbatch++) append_forward(list, chunk, stages, microbatch);
    for (int microbatch = 0; microbatch < microbatches; microbatch++) {
        append_backward(list, chunk, stages, microbatch);
        if (microbatch + ahead < microbatches) append_forward(list, chunk, stages, microbatch + ahead);
    }
    append(list, HAPT_INSTRUCTION_REDUCE, chunk, -1);
    if (tied) append(list, HAPT_INSTRUCTION_EXCHANGE, chunk, -1);
    append(list, HAPT_INSTRUCTION_NORM, -1, -1);
    for (int group = 0; group < groups; group++) {
        append(list, HAPT_INSTRUCTION_UPDATE, chunk, -1);
        list->instruction[list->count - 1].group = group;
    }
    return HAPT_OK;
}

enum hapt_status hapt_schedule_build(enum hapt_schedule_kind kind, int stages, int microbatches, const int *warmup,
                                     const struct hapt_schedule_options *options, struct hapt_arena *arena,
                                     struct hapt_schedule **schedule)
{
    HAPT_ASSERT(stages >= 1 && microbatches >= 1);
    const bool tied = options && options->tied && stages > 1;
    const int groups = options && options->update_groups > 0 ? options->update_groups : 1;
    struct hapt_schedule *built;
    HAPT_NEW(built, arena, 1);
    *built = (struct hapt_schedule){.kind = kind,
                                    .microbatches = microbatches,
                                    .chunk_count = stages,
                                    .submesh_count = stages,
                                    .update_groups = groups};
    HAPT_NEW(built->idle.instruction, arena, 1);
    append(&built->idle, HAPT_INSTRUCTION_NORM, -1, -1);
    HAPT_NEW(built->submesh_of, arena, stages);
    HAPT_NEW(built->list, arena, stages);
    for (int stage = 0; stage < stages; stage++) {
        const bool falls = stage == stages - 1 || warmup[stage] >= warmup[stage + 1];
        if (warmup[stage] < 1 || warmup[stage] > microbatches || !falls)
            return hapt_fail(HAPT_ERR_INPUT,
                             "launch counts must lie in [1, microbatches] and must not rise along the pipeline",
                             "stage %d cannot launch %d of %d microbatches", stage, warmup[stage], microbatches);
        built->submesh_of[stage] = stage;
        HAPT_TRY(build_list(stage, stages, microbatches, warmup[stage], tied, groups, arena, &built->list[stage]));
    }
    *schedule = built;
    return HAPT_OK;
}
