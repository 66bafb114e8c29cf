/*
 * The messages between stages: those of the planner, from layers and tables of the profile, against those of the
 * trainer, from programs and tensors. Random graphs with skips, random stages, subclusters and submeshes.
 */
#include "fixture.h"
#include "programs.h"

#include "hapt/plan.h"
#include "hapt/train.h"

#include "../../src/layers/structure.h"

enum { MOST_STAGES = 6, MOST_CLUSTERS = 3 };

struct instance {
    struct hapt_arena arena;
    struct hapt_graph *graph;
    struct hapt_layers layers;
    struct hapt_profile *profile;
    struct hapt_plan plan;
    struct hapt_program *program[MOST_STAGES];
    struct hapt_edges *edges;
};

static int below(uint64_t *seed, int count)
{
    return (int)(hapt_random_next(seed) % (uint64_t)count);
}

/* A layer for each operator, or for a few. */
static void make_layers(struct instance *instance, uint64_t *seed)
{
    struct hapt_layers *layers = &instance->layers;
    const int ops = instance->graph->forward_count, most = 1 + below(seed, 3);
    double *crossing;
    HAPT_ASSERT((crossing = hapt_arena_alloc(&instance->arena, (size_t)ops + 1, sizeof *crossing)));
    HAPT_ASSERT((layers->end_op = hapt_arena_alloc(&instance->arena, (size_t)ops, sizeof(int))));
    layers->count = 0;
    for (int end = 0; end < ops;) {
        end += 1 + below(seed, most);
        layers->end_op[layers->count++] = end < ops ? end : ops;
    }
    CHECK_OK(hapt_structure_boundary_bytes(instance->graph, &instance->arena, crossing));
    CHECK_OK(hapt_profile_create(layers->count, MOST_CLUSTERS, &instance->arena, &instance->profile));
    for (int l = 0; l < layers->count; l++) instance->profile->boundary_bytes[l] = crossing[layers->end_op[l]];
    for (int k = 0; k < MOST_CLUSTERS * MOST_CLUSTERS; k++) {
        const int a = k / MOST_CLUSTERS, b = k % MOST_CLUSTERS, low = a < b ? a : b, high = a < b ? b : a;
        instance->profile->link_bandwidth[k] = a == b ? 1e9 : 1e6 * (1 + low + 3 * high);
        instance->profile->link_latency[k] = 1e-4;
    }
    CHECK_OK(hapt_crossings_find(instance->graph, layers, &instance->arena, &instance->arena,
                                 &instance->profile->crossings));
}

/* Stages on submeshes of their own; sometimes a stage returns to an earlier submesh. */
static void make_plan(struct instance *instance, uint64_t *seed)
{
    struct hapt_plan *plan = &instance->plan;
    const int L = instance->layers.count, most = L < MOST_STAGES ? L : MOST_STAGES, S = 1 + below(seed, most);
    const bool ordered = below(seed, 2), folds = !ordered && below(seed, 2);
    const int clusters = 2 + below(seed, MOST_CLUSTERS - 1);
    *plan = (struct hapt_plan){.microbatches = 4, .layer_count = L};
    CHECK_OK(hapt_plan_allot(plan, S, &instance->arena));
    for (int i = 0, cluster = 0, end = 0; i < S; i++) {
        struct hapt_plan_stage *stage = &plan->stage[i];
        stage->first_layer = end;
        stage->end_layer = end = i == S - 1 ? L : end + 1 + below(seed, L - end - (S - i - 1));
        cluster = ordered ? cluster + (cluster < clusters - 1 && below(seed, 2)) : below(seed, clusters);
        stage->submesh->subcluster[0] = cluster;
        if (folds && i > 0 && below(seed, 2)) stage->submesh = plan->stage[below(seed, i)].submesh;
        stage->first_op = hapt_layers_first_op(&instance->layers, stage->first_layer);
        stage->end_op = instance->layers.end_op[end - 1];
    }
    for (int i = 0; i + 1 < S; i++)
        plan->stage[i].comm_s =
            hapt_profile_comm_s(instance->profile, plan->stage[i].end_layer - 1, plan->stage[i].submesh->subcluster[0],
                                plan->stage[i + 1].submesh->subcluster[0]);
    CHECK_OK(hapt_plan_find_edges(instance->profile, plan));
    for (int i = 0; i < S; i++)
        CHECK_OK(program_data_parallel(instance->graph, plan->stage[i].first_op, plan->stage[i].end_op, 1, 1,
                                       &instance->arena, &instance->program[i]));
    CHECK_OK(hapt_edges_build(instance->program, S, plan, &instance->arena, &instance->edges));
}

/* Bytes that the trainer sends from one stage to another. */
static double trained_bytes(const struct instance *instance, int from, int to)
{
    double bytes = 0;
    for (int e = 0; e < instance->edges->count; e++) {
        const struct hapt_edge *edge = &instance->edges->edge[e];
        for (int i = 0; i < edge->count && edge->from == from && edge->to == to; i++)
            bytes += (double)hapt_tensor_bytes(&instance->program[to]->graph->tensor[edge->tensor[i]]);
    }
    return bytes;
}

/* Bytes that the plan charges. */
static double planned_bytes(const struct instance *instance, int from, int to)
{
    const struct hapt_plan *plan = &instance->plan;
    const int low = from < to ? from : to;
    for (int e = 0; e < plan->edge_count; e++)
        if (plan->edge[e].edge.from == from && plan->edge[e].edge.to == to) return plan->edge[e].bytes;
    if (plan->edge_count > 0 || abs(from - to) != 1) return 0;
    return instance->profile->boundary_bytes[plan->stage[low].end_layer - 1];
}

/* Else the planner has one cost for both directions of a boundary, that of the activations. */
static bool has_far_edge(const struct hapt_plan *plan)
{
    for (int e = 0; e < plan->edge_count; e++)
        if (abs(plan->edge[e].edge.from - plan->edge[e].edge.to) > 1) return true;
    return false;
}

static bool has_relay(const struct hapt_plan *plan, int via, int to)
{
    for (int k = 0; k < plan->relay_count; k++)
        if (plan->relay[k].via == via && plan->relay[k].to == to) return true;
    return false;
}

static bool is_remote(const struct hapt_plan *plan, int from, int to)
{
    return plan->stage[from].submesh->subcluster[0] != plan->stage[to].submesh->subcluster[0];
}

/* True if the stages of each subcluster are neighbours, each on a submesh of its own. */
static bool is_plain(const struct hapt_plan *plan)
{
    for (int i = 0; i < plan->stage_count; i++)
        for (int k = 0; k < i; k++) {
            if (plan->stage[i].submesh == plan->stage[k].submesh) return false;
            if (!is_remote(plan, i, k) && is_remote(plan, i - 1, i)) return false;
        }
    return true;
}

/* With two subclusters one behind the other, the boundary between them is charged for exactly the bytes that cross the
 * link: each tensor once. Returns false if the plan is no such one. */
static bool check_trunk(const struct instance *instance)
{
    const struct hapt_plan *plan = &instance->plan;
    int cut = -1, cuts = 0;
    for (int i = 0; i + 1 < plan->stage_count; i++)
        if (is_remote(plan, i, i + 1)) cut = i, cuts++;
    if (cuts != 1 || !is_plain(plan)) return false;
    double bytes = 0;
    for (int from = 0; from <= cut; from++)
        for (int to = cut + 1; to < plan->stage_count; to++) bytes += trained_bytes(instance, from, to);
    CHECK_NEAR(bytes, instance->profile->boundary_bytes[plan->stage[cut].end_layer - 1], 0);
    return true;
}

/* The lower bounds are at most the bytes that this plan sends. */
static void check_least_bytes(struct instance *instance)
{
    const struct hapt_plan *plan = &instance->plan;
    double *next, *all;
    if (!instance->profile->crossings) return;
    CHECK_OK(
        hapt_crossings_least_bytes(instance->profile->crossings, plan->layer_count, &instance->arena, &next, &all));
    for (int i = 0; i + 1 < plan->stage_count; i++) {
        const int boundary = plan->stage[i].end_layer - 1;
        double there = 0;
        for (int k = i + 1; k < plan->stage_count; k++) there += trained_bytes(instance, i, k);
        CHECK(next[boundary] <= trained_bytes(instance, i, i + 1) &&
              next[boundary] <= trained_bytes(instance, i + 1, i));
        /* Subclusters one behind the other: none of the stages beyond gets a tensor from one that it passes on. */
        if (plan->relay_count == 0) CHECK(all[boundary] <= there);
    }
}

/* All that submeshes send over a link in one direction takes the time of the link for all of it. */
static void check_shares(const struct instance *instance)
{
    const struct hapt_plan *plan = &instance->plan;
    for (int e = 0; e < plan->edge_count; e++) {
        const struct hapt_plan_edge *at = &plan->edge[e];
        const int a = plan->stage[at->edge.from].submesh->subcluster[0],
                  b = plan->stage[at->edge.to].submesh->subcluster[0];
        double all = 0, own_s = 0, messages = 0;
        for (int k = 0; k < plan->edge_count && a != b && at->bytes > 0; k++) {
            const struct hapt_plan_edge *other = &plan->edge[k];
            const int c = plan->stage[other->edge.from].submesh->subcluster[0],
                      d = plan->stage[other->edge.to].submesh->subcluster[0];
            if (a != c || b != d) continue;
            all += other->bytes;
            if (plan->stage[other->edge.from].submesh != plan->stage[at->edge.from].submesh) continue;
            own_s += other->time_s;
            messages += other->bytes > 0;
        }
        const double link_s = all / instance->profile->link_bandwidth[a * MOST_CLUSTERS + b];
        if (all > 0) CHECK_NEAR(own_s, link_s + messages * 1e-4, 1e-9 * link_s);
    }
}

/* Without the profile's tables the model gives the same messages between the same stages, and the same relays. */
static void check_model_edges(const struct instance *instance)
{
    const struct hapt_plan *plan = &instance->plan;
    struct hapt_plan other = *plan;
    other.edge_count = other.relay_count = 0;
    CHECK_OK(hapt_plan_find_model_edges(instance->graph, &other));
    if (other.edge_count ==
        0) { /* all tensors go to neighbours; these may share links, which the profile knows alone */
        CHECK(!has_far_edge(plan) && plan->relay_count == 0);
        return;
    }
    if (!CHECK(other.edge_count == plan->edge_count && other.relay_count == plan->relay_count)) return;
    for (int e = 0; e < plan->edge_count; e++) {
        const struct hapt_plan_edge *a = &plan->edge[e], *b = &other.edge[e];
        const bool far = abs(b->edge.from - b->edge.to) > 1;
        const int low = b->edge.from < b->edge.to ? b->edge.from : b->edge.to;
        CHECK(hapt_schedule_compare_edges(&a->edge, &b->edge) == 0 && a->bytes == b->bytes);
        CHECK(b->edge.link == 0 && b->time_s == (far ? 0 : plan->stage[low].comm_s));
    }
    CHECK(plan->relay_count == 0 || !memcmp(plan->relay, other.relay, (size_t)plan->relay_count * sizeof *plan->relay));
}

static void plans_know_what_is_sent(void)
{
    const int rounds = test_long() ? 20000 : 1500;
    int far = 0, relays = 0, trunks = 0, links = 0;
    for (int round = 1; round <= rounds; round++) {
        const long before = test_failures;
        static struct instance instance;
        uint64_t seed = (uint64_t)round;
        hapt_arena_init(&instance.arena);
        instance.graph = fixture_random(&instance.arena, &seed, 4 + below(&seed, 20));
        make_layers(&instance, &seed);
        make_plan(&instance, &seed);
        const struct hapt_plan *plan = &instance.plan;
        for (int from = 0; from < plan->stage_count; from++)
            for (int to = 0; to < plan->stage_count; to++)
                if (from < to || (from > to && has_far_edge(plan)))
                    CHECK_MESSAGE(trained_bytes(&instance, from, to) == planned_bytes(&instance, from, to),
                                  "from stage %d to %d: %g bytes are sent, %g charged", from, to,
                                  trained_bytes(&instance, from, to), planned_bytes(&instance, from, to));
        for (int e = 0; e < instance.edges->count; e++) {
            const struct hapt_edge *edge = &instance.edges->edge[e];
            if (edge->relayed) CHECK(has_relay(plan, edge->from, edge->to) && !is_remote(plan, edge->from, edge->to));
        }
        for (int e = 0; e < plan->edge_count; e++) {
            const struct hapt_schedule_edge *edge = &plan->edge[e].edge;
            CHECK((edge->link > 0) == is_remote(plan, edge->from, edge->to));
            far += abs(edge->from - edge->to) > 1;
            links += edge->link > 0;
        }
        CHECK_OK(hapt_plan_check_edges(plan));
        check_model_edges(&instance);
        relays += plan->relay_count;
        trunks += check_trunk(&instance);
        check_least_bytes(&instance);
        check_shares(&instance);
        if (test_failures > before) fprintf(stderr, "round %d, %d stages\n", round, plan->stage_count);
        hapt_arena_release(&instance.arena);
    }
    CHECK_MESSAGE(far > rounds && relays > rounds / 40 && trunks > rounds / 10 && links > rounds,
                  "%d messages past a stage, %d relays, %d trunks, %d over links", far, relays, trunks, links);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(plans_know_what_is_sent);
    return test_finish();
}
