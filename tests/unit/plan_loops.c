/*
 * Looped plans: files, settings that are refused, frozen prefixes, memory; and their search compared with all rows,
 * cuts and programs of small random profiles. HAPT_LONG=1: more instances.
 */
#include "even_profile.h"

#include <unistd.h>

enum { MOST_STAGES = 16 };

static struct hapt_arena arena;
static char folder[64];

static const char *path_of(const char *name)
{
    return hapt_arena_printf(&arena, "%s/%s", folder, name);
}

static struct hapt_search_options options_of(enum hapt_schedule_kind kind, int microbatches)
{
    return (struct hapt_search_options){.objective = HAPT_OBJECTIVE_STEP,
                                        .microbatches = microbatches,
                                        .schedule = kind,
                                        .loops = {.prefetch = -1},
                                        .hide_threshold = 0.02};
}

/* Four devices, two loops, one layer a stage. */
static struct hapt_plan *looped_on(const struct hapt_profile *profile, enum hapt_schedule_kind kind, bool v)
{
    struct hapt_plan *plan = NULL;
    struct hapt_search_options options = options_of(kind, 8);
    const char *stages = "0-1@even:1x1,1-2@even:1x1,2-3@even:1x1,3-4@even:1x1,"
                         "4-5@even:1x1,5-6@even:1x1,6-7@even:1x1,7-8@even:1x1";
    options.loops.loops = 2;
    options.loops.v = v;
    CHECK_OK(hapt_plan_force(profile, &options, stages, &arena, &plan));
    return plan;
}

static struct hapt_plan *looped_plan(enum hapt_schedule_kind kind, bool v)
{
    return looped_on(even_profile(4, 8, 1e6, &arena), kind, v);
}

static void files_keep_what_makes_the_lists(void)
{
    for (int kind = HAPT_SCHEDULE_INTERLEAVED; kind < HAPT_SCHEDULE_KINDS; kind++)
        for (int v = 0; v < 2; v++) {
            struct hapt_plan *plan = looped_plan((enum hapt_schedule_kind)kind, v), *read = NULL;
            if (!plan) continue;
            if (kind == HAPT_SCHEDULE_LOOPED && !v)
                for (int s = 0; s < 4; s++) plan->submesh[s].ahead = 12 - s;
            CHECK_OK(hapt_plan_change(plan, plan->schedule, 8, 0.02));
            CHECK_OK(hapt_plan_save(path_of("plan.h5"), plan));
            CHECK_OK(hapt_plan_load(path_of("plan.h5"), &arena, &read));
            if (!read) continue;
            CHECK(read->schedule == plan->schedule && read->loop_batch == plan->loop_batch &&
                  read->prefetch == plan->prefetch && read->submesh_count == 4 && read->stage_count == 8);
            CHECK(hapt_plan_loops(read) == 2 && hapt_plan_is_v(read) == (v == 1));
            for (int s = 0; s < 4; s++)
                CHECK(read->submesh[s].ahead == plan->submesh[s].ahead && read->submesh[s].slots > 1);
            struct hapt_schedule *a, *b;
            CHECK_OK(hapt_plan_schedule(plan, false, &arena, &a));
            CHECK_OK(hapt_plan_schedule(read, false, &arena, &b));
            for (int s = 0; s < 4; s++) {
                CHECK(a->list[s].count == b->list[s].count && a->list[s].slots == read->submesh[s].slots);
                CHECK(!memcmp(a->list[s].instruction, b->list[s].instruction,
                              (size_t)a->list[s].count * sizeof *a->list[s].instruction));
            }
            CHECK_NEAR(read->simulated_s, plan->simulated_s, 0);
        }
}

/* Interleaved loops of 4 devices have half of the bubble of 1F1B: (D - 1)(forward + backward) / loops. */
static void loops_halve_the_bubble(void)
{
    struct hapt_plan *plan = looped_plan(HAPT_SCHEDULE_INTERLEAVED, false);
    if (!plan) return;
    const double work_s = 8 * 2 * 3.0, bubble_s = 3 * 2 * 3.0 / 2;
    CHECK(plan->simulated_s > work_s + bubble_s && plan->simulated_s < work_s + bubble_s + 0.1);
    CHECK_NEAR(plan->t_max_s, 6, 1e-12);
    CHECK(strcmp(plan->limit, "compute") == 0);
}

/* A slot holds one (chunk, microbatch): the pool of a submesh is smaller than the launches of its stages together. */
static void memory_is_that_of_the_lists(void)
{
    struct hapt_plan *plan = looped_plan(HAPT_SCHEDULE_INTERLEAVED, false);
    double have_bytes;
    if (!plan) return;
    const int launches = plan->stage[0].warmup + plan->stage[4].warmup, slots = plan->submesh[0].slots;
    CHECK(slots <= launches && slots >= 4);
    CHECK_NEAR(hapt_plan_submesh_bytes(plan, &plan->submesh[0], &have_bytes), 200 + 10 * slots, 0);
    CHECK_NEAR(have_bytes, 1e6, 0);
    /* exactly as much memory as the lists need is enough; a byte less is not */
    struct hapt_search_options options = options_of(HAPT_SCHEDULE_INTERLEAVED, 8);
    options.loops.loops = 2;
    for (int less = 0; less < 2; less++) {
        struct hapt_plan *tight = NULL;
        const enum hapt_status status = hapt_plan_force(even_profile(4, 8, 200 + 10 * slots - less, &arena), &options,
                                                        "0-1@even:1x1,1-2@even:1x1,2-3@even:1x1,3-4@even:1x1,"
                                                        "4-5@even:1x1,5-6@even:1x1,6-7@even:1x1,7-8@even:1x1",
                                                        &arena, &tight);
        CHECK(status == (less ? HAPT_ERR_INFEASIBLE : HAPT_OK));
        hapt_fail_reset();
        if (less) continue;
        CHECK_OK(hapt_plan_save(path_of("tight.h5"), tight));
        CHECK_OK(hapt_plan_load(path_of("tight.h5"), &arena, &plan));
        CHECK(plan && plan->submesh[0].slots == slots);
    }
}

/* Two devices that take turns need a transfer slot for most of a group. One less deadlocks, and its memory counts: of a
 * stage, two boundaries in front (received, sent) and one behind. */
static void large_groups_get_transfer_slots(void)
{
    struct hapt_search_options options = options_of(HAPT_SCHEDULE_BREADTH_FIRST, 64);
    struct hapt_plan *plan = NULL, *read = NULL;
    int misfit;
    double have_bytes;
    options.loops.loops = 2;
    CHECK_OK(hapt_plan_force(even_profile(2, 4, 1e6, &arena), &options,
                             "0-1@even:1x1,1-2@even:1x1,2-3@even:1x1,3-4@even:1x1", &arena, &plan));
    if (!plan) return;
    CHECK(plan->transfer_slots > HAPT_TRANSFER_SLOTS && plan->transfer_slots <= 64);
    const int more = plan->transfer_slots - HAPT_TRANSFER_SLOTS;
    CHECK_NEAR(plan->stage[0].parameter_bytes, 100 + more, 0);
    CHECK_NEAR(plan->stage[1].parameter_bytes, 100 + 3 * more, 0);
    CHECK_NEAR(plan->stage[3].parameter_bytes, 100 + 2 * more, 0);
    CHECK_NEAR(hapt_plan_submesh_bytes(plan, &plan->submesh[0], &have_bytes),
               200 + 4 * more + 10 * plan->submesh[0].slots, 0);
    CHECK_OK(hapt_plan_save(path_of("slots.h5"), plan));
    CHECK_OK(hapt_plan_load(path_of("slots.h5"), &arena, &read));
    CHECK(read && read->transfer_slots == plan->transfer_slots);
    plan->transfer_slots--;
    CHECK_FAILS(hapt_plan_launch_loops(plan, &misfit), HAPT_ERR_USAGE);
    CHECK_OK(hapt_plan_save(path_of("slots.h5"), plan));
    CHECK_FAILS(hapt_plan_load(path_of("slots.h5"), &arena, &read), HAPT_ERR_INPUT);
    /* without loops there are as few as ever */
    plan->transfer_slots++;
    CHECK_OK(hapt_plan_change(plan, HAPT_SCHEDULE_1F1B, 64, 0.02));
    CHECK(plan->transfer_slots == 0);
}

/* A layer's backward pass takes 2 s, of which 1 s may wait, with 5 bytes in a weight slot. */
static struct hapt_profile *split_profile(double memory_bytes)
{
    struct hapt_profile *profile = even_profile(4, 8, memory_bytes, &arena);
    struct hapt_profile_cluster *cluster = &profile->cluster[0];
    const size_t cells = (size_t)cluster->submesh_count * 64;
    cluster->weight_time = hapt_arena_alloc(&arena, cells, sizeof(double));
    cluster->split_parameter_bytes = hapt_arena_alloc(&arena, cells, sizeof(double));
    cluster->weight_slot_bytes = hapt_arena_alloc(&arena, cells, sizeof(double));
    for (int s = 0; s < cluster->submesh_count; s++)
        for (int i = 0; i < 8; i++)
            for (int j = i; j < 8; j++) {
                const size_t cell = hapt_profile_index(profile, s, i, j);
                cluster->weight_time[cell] = j - i + 1;
                cluster->split_parameter_bytes[cell] = cluster->parameter_bytes[cell];
                cluster->weight_slot_bytes[cell] = 5 * (j - i + 1);
            }
    return profile;
}

/* Split loops: shorter, with the slots of unsplit ones; weight slots have their bytes, and as many are granted as fit.
 * Files keep them. */
static void loops_can_be_split(void)
{
    for (int v = 0; v < 2; v++) {
        struct hapt_plan *plan = looped_on(split_profile(1e6), HAPT_SCHEDULE_LOOPED, v), *read = NULL;
        const double whole_s = plan->simulated_s;
        const int slots = plan->submesh[0].slots;
        double have_bytes;
        CHECK_OK(hapt_plan_split_backward(split_profile(1e6), plan));
        CHECK_OK(hapt_plan_check(plan));
        CHECK_MESSAGE(plan->simulated_s < whole_s && plan->simulated_s >= 8 * 2 * 3.0, "%g s, %g s before",
                      plan->simulated_s, whole_s);
        CHECK(plan->split && plan->submesh[0].slots == slots);
        const int other = v ? 7 : 4, waits = plan->stage[0].weight_slots + plan->stage[other].weight_slots;
        CHECK(plan->stage[other].submesh == plan->submesh && waits >= 2);
        CHECK_NEAR(hapt_plan_submesh_bytes(plan, plan->submesh, &have_bytes), 200 + 10 * slots + 5 * waits, 0);
        CHECK_OK(hapt_plan_save(path_of("split.h5"), plan));
        CHECK_OK(hapt_plan_load(path_of("split.h5"), &arena, &read));
        if (!read) continue;
        struct hapt_schedule *a, *b;
        CHECK_OK(hapt_plan_schedule(plan, false, &arena, &a));
        CHECK_OK(hapt_plan_schedule(read, false, &arena, &b));
        CHECK_OK(hapt_schedule_check(b));
        for (int s = 0; s < 4; s++)
            CHECK(a->list[s].count == b->list[s].count && a->list[s].slots == read->submesh[s].slots &&
                  !memcmp(a->list[s].instruction, b->list[s].instruction,
                          (size_t)a->list[s].count * sizeof *a->list[s].instruction));
        /* room for one weight slot each, and less */
        for (int less = 0; less < 2; less++) {
            struct hapt_plan *tight = looped_on(split_profile(1e6), HAPT_SCHEDULE_LOOPED, v);
            int most = 0;
            for (int s = 0; s < 4; s++) most = tight->submesh[s].slots > most ? tight->submesh[s].slots : most;
            const struct hapt_profile *small = split_profile(200 + 10 * most + 5 * 2 - less);
            CHECK(hapt_plan_split_backward(small, tight) == (less ? HAPT_ERR_INFEASIBLE : HAPT_OK));
            CHECK(tight->split == !less && (less || tight->stage[0].weight_slots == 1));
            hapt_fail_reset();
        }
    }
}

/* A tensor that layer `from` makes and `to` reads, and its gradient. */
static void add_skip(struct hapt_crossings *crossings, int from, int to)
{
    for (int d = 0; d < 2; d++) {
        const int k = crossings->count++, at = crossings->start[k];
        crossings->layer[at] = d ? to : from;
        crossings->layer[at + 1] = d ? from : to;
        crossings->writes[at] = true;
        crossings->bytes[k] = 10 * (1 + from);
        crossings->start[k + 1] = at + 2;
    }
}

/* The lists of a plan have its messages past the next stage, but for gradients to stages without backward passes. */
static void lists_have_the_messages_of_the_plan(void)
{
    enum { CROSSINGS = 20 };
    struct hapt_profile *profile = even_profile(4, 8, 1e6, &arena);
    struct hapt_crossings *crossings = hapt_arena_alloc(&arena, 1, sizeof *crossings);
    crossings->bytes = hapt_arena_alloc(&arena, CROSSINGS, sizeof(double));
    crossings->start = hapt_arena_alloc(&arena, CROSSINGS + 1, sizeof(int));
    crossings->layer = hapt_arena_alloc(&arena, 2 * CROSSINGS, sizeof(int));
    crossings->writes = hapt_arena_alloc(&arena, 2 * CROSSINGS, sizeof(bool));
    for (int l = 0; l + 1 < 8; l++) add_skip(crossings, l, l + 1);
    add_skip(crossings, 0, 6);
    add_skip(crossings, 2, 5);
    CHECK_OK(hapt_crossings_check(crossings, 8));
    profile->crossings = crossings;
    for (int kind = HAPT_SCHEDULE_INTERLEAVED; kind < HAPT_SCHEDULE_KINDS; kind++)
        for (int frozen = 0; frozen < 4; frozen += 3) {
            struct hapt_plan *plan = looped_on(profile, (enum hapt_schedule_kind)kind, false);
            struct hapt_schedule *made;
            struct hapt_costs costs;
            if (!plan) continue;
            CHECK(plan->edge_count == 2 * 7 + 2 * 2);
            for (int i = 0; i < frozen; i++) plan->stage[i].forward_only = 1;
            CHECK_OK(hapt_plan_change(plan, plan->schedule, 8, 0.02));
            CHECK_OK(hapt_plan_lay_out(plan, &arena, &made, &costs));
            CHECK(hapt_plan_has_edges(plan, made));
            CHECK(made->edges.count == plan->edge_count - (frozen ? 3 + 2 : 0));
            for (int e = 0; e < made->edges.count; e++) {
                const struct hapt_schedule_edge *edge = &made->edges.edge[e];
                const struct hapt_plan_edge *of = hapt_plan_sent_edge(plan, e);
                const int low = edge->from < edge->to ? edge->from : edge->to;
                CHECK(of->edge.from == edge->from && of->edge.to == edge->to);
                CHECK(!edge->backward || edge->to >= frozen);
                CHECK_NEAR(of->bytes, 10 * (1 + low), 0);
                CHECK_NEAR(costs.edge_s[e], of->bytes / 1e3, 1e-12);
            }
            plan->stage[0].forward_only = !plan->stage[0].forward_only;
            CHECK(!hapt_plan_has_edges(plan, made));
        }
}

#define REFUSED(change)                                                \
    do {                                                               \
        struct hapt_plan *plan = looped_plan(HAPT_SCHEDULE_LOOPED, 0); \
        CHECK_OK(hapt_plan_check(plan));                               \
        change;                                                        \
        CHECK_FAILS(hapt_plan_check(plan), HAPT_ERR_INPUT);            \
    } while (0)

static void contradictions_are_refused(void)
{
    REFUSED(plan->loop_batch = 3);
    REFUSED(plan->loop_batch = -1);
    REFUSED(plan->prefetch = -1);
    REFUSED(plan->transfer_slots = 2);
    REFUSED(plan->schedule = HAPT_SCHEDULE_1F1B; plan->loop_batch = plan->prefetch = 0; plan->transfer_slots = 4);
    REFUSED(plan->schedule = HAPT_SCHEDULE_INTERLEAVED; plan->prefetch = 1);
    REFUSED(plan->schedule = HAPT_SCHEDULE_1F1B; plan->loop_batch = 4);
    REFUSED(plan->submesh[1].ahead = 3);
    REFUSED(plan->stage[1].forward_only = 1);
    REFUSED(for (int i = 0; i < 8; i++) plan->stage[i].forward_only = 1);
    REFUSED(plan->stage[0].forward_only = 2);
    /* lists that deadlock: of a file, and of a caller with a hint that works */
    struct hapt_plan *plan = looped_plan(HAPT_SCHEDULE_LOOPED, 0), *read = NULL;
    int misfit;
    for (int s = 0; s < 4; s++) plan->submesh[s].ahead = 1;
    CHECK_OK(hapt_plan_save(path_of("dead.h5"), plan));
    CHECK_FAILS(hapt_plan_load(path_of("dead.h5"), &arena, &read), HAPT_ERR_INPUT);
    CHECK_FAILS(hapt_plan_launch_loops(plan, &misfit), HAPT_ERR_USAGE);
}

/* Settings that do not divide the microbatches name the nearest that do. */
static void hints_name_settings_that_work(void)
{
    struct hapt_search_options options = options_of(HAPT_SCHEDULE_LOOPED, 8);
    struct hapt_plan *plan;
    options.loops.loop_batch = 3;
    CHECK(hapt_plan_search(MPI_COMM_SELF, even_profile(4, 8, 1e6, &arena), &options, &arena, &plan) == HAPT_ERR_USAGE);
    CHECK_MESSAGE(strstr(hapt_fail_hint(), "--loop-batch 2") || strstr(hapt_fail_hint(), "--loop-batch 4"), "%s",
                  hapt_fail_hint());
    hapt_fail_reset();
    /* 7 microbatches on 4 submeshes: the interleaved groups of 4 do not fit; one group of 7 does */
    struct hapt_plan *seven = looped_plan(HAPT_SCHEDULE_INTERLEAVED, false);
    CHECK(hapt_plan_change(seven, HAPT_SCHEDULE_INTERLEAVED, 7, 0.02) == HAPT_ERR_USAGE);
    CHECK_MESSAGE(strstr(hapt_fail_hint(), "--loop-batch "), "%s", hapt_fail_hint());
    const int batch = atoi(strstr(hapt_fail_hint(), "--loop-batch ") + 13);
    hapt_fail_reset();
    seven->loop_batch = batch;
    CHECK_OK(hapt_plan_change(seven, HAPT_SCHEDULE_INTERLEAVED, 7, 0.02));
    /* too few layers */
    options = options_of(HAPT_SCHEDULE_INTERLEAVED, 8);
    options.loops.loops = 8;
    CHECK(hapt_plan_search(MPI_COMM_SELF, even_profile(4, 8, 1e6, &arena), &options, &arena, &plan) ==
          HAPT_ERR_INFEASIBLE);
    CHECK_MESSAGE(strstr(hapt_fail_hint(), "--layers-per-model"), "%s", hapt_fail_hint());
    hapt_fail_reset();
    /* no memory */
    options.loops.loops = 2;
    CHECK(hapt_plan_search(MPI_COMM_SELF, even_profile(4, 8, 215, &arena), &options, &arena, &plan) ==
          HAPT_ERR_INFEASIBLE);
    hapt_fail_reset();
}

/* A plan keeps its stages under a schedule without loops, and the reverse. */
static void schedules_can_be_changed(void)
{
    struct hapt_plan *plan = looped_plan(HAPT_SCHEDULE_LOOPED, false);
    const double looped_s = plan->simulated_s;
    const int batch = plan->loop_batch, prefetch = plan->prefetch;
    CHECK_OK(hapt_plan_change(plan, HAPT_SCHEDULE_1F1B, 8, 0.02));
    CHECK_OK(hapt_plan_check(plan));
    CHECK(plan->loop_batch == 0 && plan->submesh[0].slots == 0);
    plan->loop_batch = batch;
    plan->prefetch = prefetch;
    CHECK_OK(hapt_plan_change(plan, HAPT_SCHEDULE_LOOPED, 8, 0.02));
    CHECK_OK(hapt_plan_check(plan));
    CHECK_NEAR(plan->simulated_s, looped_s, 0);
}

/* A plan of 8 stages of 10 operators each, the first `frozen` without backward time. */
static struct hapt_plan *plan_to_freeze(bool looped, int frozen)
{
    struct hapt_plan *plan = looped_plan(HAPT_SCHEDULE_INTERLEAVED, false);
    for (int i = 0; i < 8; i++) {
        plan->stage[i].first_op = 10 * i;
        plan->stage[i].end_op = 10 * i + 10;
        if (i < frozen) plan->stage[i].compute_s = plan->stage[i].forward_s;
    }
    CHECK_OK(hapt_plan_change(plan, looped ? HAPT_SCHEDULE_INTERLEAVED : HAPT_SCHEDULE_1F1B, 8, 0.02));
    return plan;
}

/* The stages before the first trained operator: fewer slots, no gradients over their boundaries. */
static void frozen_prefixes(void)
{
    for (int looped = 0; looped < 2; looped++) {
        struct hapt_plan *plan = plan_to_freeze(looped, 4), *read = NULL;
        const double before_s = plan->simulated_s;
        const int launches = plan->stage[0].warmup;
        CHECK_OK(hapt_plan_freeze(plan, 47));
        for (int i = 0; i < 8; i++) CHECK(plan->stage[i].forward_only == (i < 4));
        CHECK_OK(hapt_plan_check(plan));
        CHECK_MESSAGE(plan->simulated_s < before_s, "looped %d: %g s, %g s before", looped, plan->simulated_s,
                      before_s);
        CHECK(plan->stage[0].warmup <= 2 && launches > 2);
        CHECK_OK(hapt_plan_save(path_of("frozen.h5"), plan));
        CHECK_OK(hapt_plan_load(path_of("frozen.h5"), &arena, &read));
        for (int i = 0; read && i < 8; i++)
            CHECK(read->stage[i].forward_only == (i < 4) && read->stage[i].warmup == plan->stage[i].warmup);
        CHECK_OK(hapt_plan_freeze(plan, 0));
        CHECK(plan->stage[0].forward_only == 0 && plan->stage[0].warmup == launches);
        CHECK_NEAR(plan->simulated_s, before_s, 1e-12);
    }
    /* submesh 3 trains two stages, the others one: never slower than with empty backward passes */
    struct hapt_plan *plan = plan_to_freeze(true, 3);
    const double before_s = plan->simulated_s;
    CHECK_OK(hapt_plan_freeze(plan, 30));
    CHECK_OK(hapt_plan_check(plan));
    CHECK(plan->simulated_s <= before_s);
}

/* ---- The search, against all plans ---- */

struct brute {
    const struct hapt_profile *profile;
    struct hapt_search_options options;
    struct hapt_arena arena;
    int slots, cluster[MOST_STAGES], submesh[MOST_STAGES], used[HAPT_MAX_SUBCLUSTERS], end[MOST_STAGES];
    double best_s;
    long priced;
};

static void price(struct brute *brute, int loop_batch, int prefetch)
{
    const int stages = brute->slots * brute->options.loops.loops;
    struct hapt_plan plan = hapt_search_plan(brute->profile, &brute->options);
    hapt_arena_reset(&brute->arena);
    CHECK_OK(hapt_plan_allot(&plan, stages, &brute->arena));
    for (int i = 0; i < stages; i++) {
        const int at = hapt_plan_place(i, brute->slots, brute->options.loops.v);
        plan.stage[i].submesh = &plan.submesh[at];
        plan.stage[i].first_layer = i > 0 ? brute->end[i - 1] : 0;
        plan.stage[i].end_layer = brute->end[i];
        hapt_plan_stage_run(brute->profile, brute->cluster[at],
                            &brute->profile->cluster[brute->cluster[at]].submesh[brute->submesh[at]], &plan.stage[i]);
    }
    plan.submesh_count = brute->slots;
    plan.loop_batch = loop_batch;
    plan.prefetch = prefetch;
    if (hapt_plan_price_launches(brute->profile, &plan) == HAPT_OK)
        brute->best_s = fmin(brute->best_s, plan.simulated_s);
    hapt_fail_reset();
    brute->priced++;
}

static void price_settings(struct brute *brute)
{
    const int B = brute->options.microbatches, D = brute->slots;
    if (brute->options.schedule == HAPT_SCHEDULE_INTERLEAVED) price(brute, 0, 0);
    for (int d = D; brute->options.schedule == HAPT_SCHEDULE_LOOPED && d <= B; d++)
        for (int b = 0; b < D && B % d == 0; b++) price(brute, d, b);
}

static void cut(struct brute *brute, int stage, int first)
{
    const int stages = brute->slots * brute->options.loops.loops, L = brute->profile->layer_count;
    if (stage == stages - 1) {
        brute->end[stage] = L;
        price_settings(brute);
        return;
    }
    for (int end = first + 1; end <= L - (stages - 1 - stage); end++) {
        brute->end[stage] = end;
        cut(brute, stage + 1, end);
    }
}

/* All rows in which the submeshes of a subcluster are neighbours. */
static void rows(struct brute *brute)
{
    if (brute->slots > 1 && brute->slots * brute->options.loops.loops <= brute->profile->layer_count) cut(brute, 0, 0);
    for (int c = 0; c < brute->profile->cluster_count && brute->slots < 4; c++) {
        const struct hapt_profile_cluster *cluster = &brute->profile->cluster[c];
        if (brute->used[c] > 0 && brute->cluster[brute->slots - 1] != c) continue;
        for (int s = 0; s < cluster->submesh_count; s++) {
            const int devices = cluster->submesh[s].n * cluster->submesh[s].m;
            if (brute->used[c] + devices > cluster->nodes * cluster->devices_per_node) continue;
            brute->cluster[brute->slots] = c;
            brute->submesh[brute->slots++] = s;
            brute->used[c] += devices;
            rows(brute);
            brute->used[c] -= devices;
            brute->slots--;
        }
    }
}

/* Layers of random work, whose times add up, on unlike subclusters; memory that is short in half of the instances. */
static struct hapt_profile *layered_profile(uint64_t *seed, struct hapt_arena *own)
{
    static const int shapes[][2] = {{1, 1}, {1, 2}, {2, 1}};
    const int C = 1 + random_below(seed, 2), L = 6 + random_below(seed, 5);
    struct hapt_profile *profile;
    double work_s[16], bytes[16];
    CHECK_OK(hapt_profile_create(L, C, own, &profile));
    for (int l = 0; l < L; l++) {
        work_s[l] = 0.2 + hapt_random_unit(seed);
        bytes[l] = 1 + 3 * hapt_random_unit(seed);
        profile->boundary_bytes[l] = l + 1 < L ? 0.3 * hapt_random_unit(seed) : 0;
    }
    for (int c = 0; c < C; c++) {
        const int *shape = shapes[C == 1 ? 1 + random_below(seed, 2) : random_below(seed, 3)];
        const double speed = 1 + 2 * hapt_random_unit(seed), room = random_chance(seed, 0.5) ? 1e3 : 4.0 * L + 30;
        char name[16];
        snprintf(name, sizeof name, "sub%d", c);
        CHECK_OK(random_profile_cluster(profile, c, name, shape[0], shape[1], room, speed, own));
        struct hapt_profile_cluster *cluster = &profile->cluster[c];
        for (int s = 0; s < cluster->submesh_count; s++)
            for (int i = 0; i < L; i++)
                for (int j = i; j < L; j++) {
                    const size_t cell = hapt_profile_index(profile, s, i, j);
                    const double rate = speed * (1 + 0.8 * (cluster->submesh[s].n * cluster->submesh[s].m - 1));
                    cluster->stage_time[cell] = cluster->parameter_bytes[cell] = cluster->activation_bytes[cell] = 0;
                    for (int l = i; l <= j; l++) {
                        cluster->stage_time[cell] += work_s[l] / rate;
                        cluster->parameter_bytes[cell] += bytes[l];
                        cluster->activation_bytes[cell] += 0.5;
                    }
                    cluster->stage_forward_time[cell] = cluster->stage_time[cell] / 3;
                }
        cluster->step_time = NULL;
    }
    for (int k = 0; k < C * C; k++) {
        profile->link_bandwidth[k] = 1 + 4 * hapt_random_unit(seed);
        profile->link_latency[k] = 0;
    }
    if (C == 2) profile->link_bandwidth[2] = profile->link_bandwidth[1];
    return profile;
}

static void search_of_small_instances(bool layered)
{
    const int instances = test_long() ? 1000 : 60;
    int compared = 0, optimal = 0, missed = 0;
    double largest = 0;
    for (uint64_t start = 1; compared < instances; start++) {
        uint64_t seed = 7000 + start;
        struct hapt_arena own;
        struct hapt_plan *plan;
        hapt_arena_init(&own);
        const int C = 1 + random_below(&seed, 2), L = 4 + random_below(&seed, 4);
        struct hapt_profile *profile = layered ? layered_profile(&seed, &own) : random_profile_of(&seed, C, L, &own);
        struct brute brute = {.profile = profile, .best_s = INFINITY};
        struct hapt_search_options options =
            options_of(random_below(&seed, 2) ? HAPT_SCHEDULE_LOOPED : HAPT_SCHEDULE_INTERLEAVED, 12);
        options.loops.loops = 2;
        options.loops.v = random_below(&seed, 3) == 0;
        options.may_fail = true;
        profile->mixed_count = 0;
        brute.options = options;
        hapt_arena_init(&brute.arena);
        rows(&brute);
        hapt_arena_release(&brute.arena);
        const enum hapt_status status = hapt_plan_search(MPI_COMM_SELF, profile, &options, &own, &plan);
        CHECK_MESSAGE(status == HAPT_OK || status == HAPT_ERR_INFEASIBLE, "seed %d: %s", (int)start,
                      hapt_fail_message());
        hapt_fail_reset();
        if (isfinite(brute.best_s)) {
            compared++;
            if (status == HAPT_OK && plan->submesh_count > 1) {
                CHECK_OK(hapt_plan_check(plan));
                const double excess = plan->simulated_s / brute.best_s - 1;
                optimal += excess <= 1e-9;
                largest = fmax(largest, excess);
            } else {
                missed++;
            }
        }
        hapt_arena_release(&own);
    }
    printf("  %d instances: optimum in %.1f %%, worst %.2f %% off, %d without a plan\n", compared,
           100.0 * optimal / compared, 100 * largest, missed);
    CHECK(optimal >= (layered ? 0.95 : 0.8) * compared && missed <= 0.03 * compared);
    CHECK(!layered || largest < 0.02);
}

static void search_of_layers(void)
{
    search_of_small_instances(true);
}

static void search_of_irregular_candidates(void)
{
    search_of_small_instances(false);
}

/* The best step of all rows and cuts with two loops. */
static double brute_force_s(const struct hapt_profile *profile, const struct hapt_search_options *options)
{
    struct brute brute = {.profile = profile, .options = *options, .best_s = INFINITY};
    brute.options.schedule = HAPT_SCHEDULE_LOOPED;
    brute.options.loops.loops = 2;
    hapt_arena_init(&brute.arena);
    for (int v = 0; v < 2; v++) {
        brute.options.loops.v = v;
        rows(&brute);
    }
    hapt_arena_release(&brute.arena);
    return brute.best_s;
}

/* A free schedule is looped if that is shorter by more than 2 %, else not. Few microbatches: filling takes long. */
static void loops_are_chosen_where_they_pay(void)
{
    const int instances = test_long() ? 300 : 30;
    int chosen = 0, paying = 0, found = 0;
    for (int k = 1; k <= instances; k++) {
        uint64_t seed = 9000 + (uint64_t)k;
        struct hapt_arena own;
        struct hapt_plan *unlooped, *plan;
        hapt_arena_init(&own);
        const struct hapt_profile *profile = layered_profile(&seed, &own);
        struct hapt_search_options options = options_of(HAPT_SCHEDULE_H1F1B, 4);
        options.any_schedule = options.any_threshold = options.may_fail = true;
        const enum hapt_status status = hapt_plan_search(MPI_COMM_SELF, profile, &options, &own, &unlooped);
        options.any_loops = true;
        CHECK(hapt_plan_search(MPI_COMM_SELF, profile, &options, &own, &plan) == status);
        hapt_fail_reset();
        if (status == HAPT_OK) {
            const bool looped = hapt_schedule_loops(plan->schedule);
            const double worth_s = 0.98 * unlooped->simulated_s, best_s = brute_force_s(profile, &options);
            CHECK_OK(hapt_plan_check(plan));
            CHECK(looped ? plan->simulated_s <= worth_s : plan->simulated_s == unlooped->simulated_s);
            chosen += looped;
            paying += best_s < worth_s;
            found += best_s < worth_s && plan->simulated_s <= 1.02 * best_s;
        }
        hapt_arena_release(&own);
    }
    printf("  %d instances: looped %d, worth it with two loops %d, found %d of these\n", instances, chosen, paying,
           found);
    CHECK(chosen > 0 && chosen < instances && found >= 0.95 * paying);
}

/* Measured times of ranges may be longer than the sum of their parts: on one device that is noise, not worth a loop. */
static void one_device_has_no_loops(void)
{
    struct hapt_profile *profile = even_profile(1, 8, 1e6, &arena);
    struct hapt_plan *plan = NULL;
    struct hapt_search_options options = options_of(HAPT_SCHEDULE_H1F1B, 4);
    options.any_schedule = options.any_threshold = options.any_loops = true;
    for (int i = 0; i < profile->layer_count; i++)
        for (int j = i; j < profile->layer_count; j++)
            profile->cluster[0].stage_time[hapt_profile_index(profile, 0, i, j)] *= 1 + 0.1 * (j - i);
    CHECK_OK(hapt_plan_search(MPI_COMM_SELF, profile, &options, &arena, &plan));
    CHECK(plan && !hapt_schedule_loops(plan->schedule) && plan->stage_count == 1);
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    hapt_arena_init(&arena);
    snprintf(folder, sizeof folder, "/tmp/hapt-loops-XXXXXX");
    CHECK(mkdtemp(folder) != NULL);
    RUN(files_keep_what_makes_the_lists);
    RUN(loops_halve_the_bubble);
    RUN(memory_is_that_of_the_lists);
    RUN(large_groups_get_transfer_slots);
    RUN(loops_can_be_split);
    RUN(lists_have_the_messages_of_the_plan);
    RUN(contradictions_are_refused);
    RUN(hints_name_settings_that_work);
    RUN(schedules_can_be_changed);
    RUN(frozen_prefixes);
    RUN(search_of_layers);
    RUN(search_of_irregular_candidates);
    RUN(loops_are_chosen_where_they_pay);
    RUN(one_device_has_no_loops);
    if (system(hapt_arena_printf(&arena, "rm -rf %s", folder))) fprintf(stderr, "rm failed\n");
    hapt_arena_release(&arena);
    return test_finish();
}
