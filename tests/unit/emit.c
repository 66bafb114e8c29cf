/*
 * Chakra traces of random plans, read again as a DAG: each computation must end when the simulator says. The DAG knows
 * the nodes and their dependencies alone, and that the messages of a channel follow each other.
 */
#include <jansson.h>
#include <unistd.h>

#include "hapt/emit.h"
#include "hapt/folder.h"
#include "test.h"

enum { MOST_STAGES = 7, MOST_MICROBATCHES = 14, MOST_NODES = 16 * MOST_STAGES * MOST_MICROBATCHES };
enum { COMPUTES = 4, SENDS = 5, RECEIVES = 6 };

static int below(uint64_t *seed, int count)
{
    return (int)(hapt_random_next(seed) % (uint64_t)count);
}

/* Submesh i, or folded: 0 1 .. 1 0 or 0 1 0 1 .. */
static int submesh_of(int fold, int stages, int stage)
{
    if (fold == 0) return stage;
    if (fold == 1) return stage < (stages + 1) / 2 ? stage : stages - 1 - stage;
    return stage % ((stages + 1) / 2);
}

static bool has_link[MOST_STAGES][MOST_STAGES]; /* submeshes whose messages share a link with others of the sender */
static int site_of[MOST_STAGES];

/* Messages past the next stage, relays, and links between two sites of submeshes. */
static void add_edges(struct hapt_plan *plan, uint64_t *seed, struct hapt_arena *arena)
{
    const int stages = plan->stage_count;
    const bool linked = below(seed, 2);
    memset(has_link, 0, sizeof has_link);
    if (stages < 3 || below(seed, 2)) return;
    plan->edge = hapt_arena_alloc(arena, (size_t)(stages * stages), sizeof *plan->edge);
    plan->relay = hapt_arena_alloc(arena, (size_t)(stages * stages * stages), sizeof *plan->relay);
    for (int s = 0; s < MOST_STAGES; s++) site_of[s] = below(seed, 2);
    for (int d = 0; d < 2; d++)
        for (int from = 0; from < stages; from++)
            for (int to = 0; to < stages; to++) {
                if (from == to || (to < from) != d || (abs(from - to) > 1 && below(seed, 3))) continue;
                const int a = (int)(plan->stage[from].submesh - plan->submesh),
                          b = (int)(plan->stage[to].submesh - plan->submesh);
                const double time_s = below(seed, 5) ? hapt_random_unit(seed) : 0;
                has_link[a][b] = linked && site_of[a] != site_of[b];
                plan->edge[plan->edge_count++] =
                    (struct hapt_plan_edge){.edge = {from, to, d, has_link[a][b] ? 1 + site_of[a] : 0},
                                            .time_s = time_s,
                                            .bytes = 1e9 * time_s,
                                            .share = 1};
            }
    for (int x = 0; x < plan->edge_count; x++)
        for (int y = 0; y < plan->edge_count; y++) {
            const struct hapt_schedule_edge *in = &plan->edge[x].edge, *out = &plan->edge[y].edge;
            if (!in->backward && !out->backward && in->to == out->from && below(seed, 3) == 0)
                plan->relay[plan->relay_count++] = (struct hapt_schedule_relay){in->from, in->to, out->to};
        }
}

static struct hapt_plan *random_plan(uint64_t *seed, struct hapt_arena *arena)
{
    const int stages = 1 + below(seed, MOST_STAGES), fold = below(seed, 3);
    const double slow = below(seed, 2) ? 3 : 0.2;
    double comm_s[MOST_STAGES];
    int warmup[MOST_STAGES];
    struct hapt_plan *plan = hapt_arena_alloc(arena, 1, sizeof *plan);
    CHECK_OK(hapt_plan_allot(plan, stages, arena));
    plan->microbatches = 1 + below(seed, MOST_MICROBATCHES);
    plan->schedule = (enum hapt_schedule_kind)below(seed, 4);
    plan->layer_count = stages;
    for (int i = 0; i < stages; i++) {
        struct hapt_plan_stage *stage = &plan->stage[i];
        stage->submesh = &plan->submesh[submesh_of(fold, stages, i)];
        stage->first_layer = i;
        stage->end_layer = i + 1;
        stage->forward_s = hapt_random_unit(seed);
        stage->step_s = below(seed, 2) ? hapt_random_unit(seed) : 0;
        stage->compute_s = stage->forward_s + 2 * hapt_random_unit(seed) + stage->step_s / plan->microbatches;
        stage->comm_s = comm_s[i] = i < stages - 1 && below(seed, 5) ? slow * hapt_random_unit(seed) : 0;
    }
    plan->submesh_count = fold == 0 ? stages : (stages + 1) / 2;
    plan->exchange_s = stages > 1 && below(seed, 2) ? hapt_random_unit(seed) : 0;
    hapt_schedule_warmup(plan->schedule, stages, plan->microbatches, comm_s, 2, 0.02, warmup);
    for (int i = 0; i < stages; i++) plan->stage[i].warmup = warmup[i];
    add_edges(plan, seed, arena);
    return plan;
}

struct node {
    int rank, peer, type, tag, dep_count, dep[80]; /* nodes of the whole DAG */
    double time_s, end_s;                          /* end_s: NaN until known; of a message for both of its nodes */
    const char *name;
    int other, before; /* a send's receive; the send before it in the channel; -1: none */
};

struct dag {
    int count;
    struct node node[MOST_NODES];
    json_t *root[MOST_STAGES];
};

static void read_rank(struct dag *dag, const char *folder, int rank)
{
    char path[256];
    json_t *root, *item, *dep;
    size_t i, k;
    const int first = dag->count;
    snprintf(path, sizeof path, "%s/rank.%d.json", folder, rank);
    root = dag->root[rank] = json_load_file(path, 0, NULL);
    CHECK(json_integer_value(json_object_get(root, "rank")) == rank);
    json_array_foreach(json_object_get(root, "workload_graph"), i, item)
    {
        struct node *node = &dag->node[dag->count++];
        HAPT_ASSERT(dag->count <= MOST_NODES);
        *node = (struct node){.rank = rank, .end_s = NAN, .other = -1, .before = -1};
        CHECK((size_t)json_integer_value(json_object_get(item, "Id")) == i);
        node->type = (int)json_integer_value(json_object_get(item, "NodeType"));
        node->tag = (int)json_integer_value(json_object_get(item, "comm_tag"));
        node->time_s = json_number_value(json_object_get(item, "time_s"));
        node->name = json_string_value(json_object_get(item, "Name"));
        if (node->type != COMPUTES) {
            const char *own = node->type == SENDS ? "comm_src" : "comm_dst";
            CHECK(json_integer_value(json_object_get(item, own)) == rank);
            node->peer = (int)json_integer_value(json_object_get(item, "comm_dst"));
            CHECK_NEAR(json_integer_value(json_object_get(item, "comm_size")), node->time_s * 1e9, 0.5);
        }
        json_array_foreach(json_object_get(item, "data_deps"), k, dep)
        {
            HAPT_ASSERT(node->dep_count < 80);
            CHECK((size_t)json_integer_value(dep) < i);
            node->dep[node->dep_count++] = first + (int)json_integer_value(dep);
        }
    }
}

/* True if two sends of a rank go over the same link. */
static bool same_link(const struct node *a, const struct node *b)
{
    if (a->rank != b->rank) return false;
    return a->peer == b->peer || (has_link[a->rank][a->peer] && has_link[b->rank][b->peer]);
}

/* The n-th send of a tag belongs to the n-th receive; sends over a link follow each other. */
static void match(struct dag *dag)
{
    for (int s = 0; s < dag->count; s++) {
        if (dag->node[s].type != SENDS) continue;
        int before = 0, r = 0;
        for (int i = 0; i < s; i++)
            if (dag->node[i].type == SENDS) {
                before += dag->node[i].tag == dag->node[s].tag;
                if (same_link(&dag->node[i], &dag->node[s])) dag->node[s].before = i;
            }
        for (; r < dag->count; r++)
            if (dag->node[r].type == RECEIVES && dag->node[r].tag == dag->node[s].tag && before-- == 0) break;
        if (CHECK_MESSAGE(r < dag->count, "%s on rank %d is never received", dag->node[s].name, dag->node[s].rank))
            dag->node[s].other = r;
    }
    for (int i = 0; i < dag->count; i++)
        for (int s = 0; dag->node[i].type == RECEIVES && dag->node[i].other < 0 && s < dag->count; s++)
            if (dag->node[s].other == i) dag->node[i].other = s;
}

static double ready_s(const struct dag *dag, const struct node *node)
{
    double ready = 0;
    for (int k = 0; k < node->dep_count; k++) {
        const double end_s = dag->node[node->dep[k]].end_s;
        if (isnan(end_s)) return NAN;
        ready = fmax(ready, end_s);
    }
    return ready;
}

static void time_dag(struct dag *dag)
{
    for (bool moved = true; moved;) {
        moved = false;
        for (int i = 0; i < dag->count; i++) {
            struct node *node = &dag->node[i];
            double start_s = ready_s(dag, node);
            if (!isnan(node->end_s) || isnan(start_s) || node->type == RECEIVES) continue;
            if (node->type == SENDS) {
                const double other_s = node->other < 0 ? NAN : ready_s(dag, &dag->node[node->other]);
                const double before_s = node->before < 0 ? 0 : dag->node[node->before].end_s;
                if (isnan(other_s) || isnan(before_s)) continue;
                start_s = fmax(start_s, fmax(other_s, before_s));
            }
            node->end_s = start_s + node->time_s;
            if (node->type == SENDS) dag->node[node->other].end_s = node->end_s;
            moved = true;
        }
    }
}

/* The computations of each rank, in order, against the simulator's. */
static void compare(const struct hapt_plan *plan, const struct dag *dag, uint64_t seed, struct hapt_arena *arena)
{
    struct hapt_schedule *schedule;
    struct hapt_costs costs;
    struct hapt_simulation *simulation;
    int at = 0;
    char name[64];
    CHECK_OK(hapt_plan_lay_out(plan, arena, &schedule, &costs));
    CHECK_OK(hapt_simulate(schedule, &costs, arena, &simulation));
    for (int s = 0; s < schedule->submesh_count; s++)
        for (int i = 0; i < schedule->list[s].count; i++) {
            const struct hapt_instruction *instruction = &schedule->list[s].instruction[i];
            const char *kind = instruction->kind == HAPT_INSTRUCTION_FORWARD    ? "forward"
                               : instruction->kind == HAPT_INSTRUCTION_BACKWARD ? "backward"
                               : instruction->kind == HAPT_INSTRUCTION_UPDATE   ? "update"
                                                                                : NULL;
            if (!kind) continue;
            while (at < dag->count && dag->node[at].type != COMPUTES) at++;
            if (!CHECK(at < dag->count)) return;
            if (instruction->microbatch < 0)
                snprintf(name, sizeof name, "%s chunk %d", kind, instruction->chunk);
            else
                snprintf(name, sizeof name, "%s chunk %d microbatch %d", kind, instruction->chunk,
                         instruction->microbatch);
            CHECK(dag->node[at].rank == s && strcmp(dag->node[at].name, name) == 0);
            CHECK_MESSAGE(fabs(dag->node[at].end_s - simulation->time[s][i].end_s) <= 1e-12 * simulation->total_s,
                          "seed %llu: %s ends at %.17g, simulated %.17g", (unsigned long long)seed, name,
                          dag->node[at].end_s, simulation->time[s][i].end_s);
            at++;
        }
    while (at < dag->count && dag->node[at].type != COMPUTES) at++;
    CHECK(at == dag->count);
    for (int i = 0; i < dag->count; i++)
        CHECK_MESSAGE(!isnan(dag->node[i].end_s), "seed %llu: %s on rank %d never ends", (unsigned long long)seed,
                      dag->node[i].name, dag->node[i].rank);
}

static bool remove_entry(void *context, const char *name)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", (const char *)context, name);
    CHECK(hapt_emit_is_own(name) && unlink(path) == 0);
    return true;
}

static void chakra_is_the_simulated_step(void)
{
    static struct dag dag;
    for (uint64_t start = 1; start <= (test_long() ? 3000u : 80u); start++) {
        uint64_t seed = start;
        struct hapt_arena arena;
        char folder[] = "/tmp/hapt-emit-XXXXXX";
        hapt_arena_init(&arena);
        const struct hapt_plan *plan = random_plan(&seed, &arena);
        CHECK(mkdtemp(folder) != NULL);
        CHECK_OK(hapt_emit_write(plan, NULL, HAPT_EMIT_CHAKRA, folder));
        dag.count = 0;
        for (int rank = 0; rank < plan->submesh_count; rank++) read_rank(&dag, folder, rank);
        match(&dag);
        time_dag(&dag);
        compare(plan, &dag, start, &arena);
        for (int rank = 0; rank < plan->submesh_count; rank++) json_decref(dag.root[rank]);
        CHECK_OK(hapt_folder_list(folder, remove_entry, folder));
        CHECK(rmdir(folder) == 0);
        hapt_arena_release(&arena);
    }
}

/* No profile of other layers, no plan without overlap, no folder under a file. */
static void refusals(void)
{
    struct hapt_arena arena;
    struct hapt_profile profile = {.layer_count = 99};
    enum hapt_emit_format format;
    uint64_t seed = 1;
    hapt_arena_init(&arena);
    struct hapt_plan *plan = random_plan(&seed, &arena);
    CHECK_FAILS(hapt_emit_write(plan, &profile, HAPT_EMIT_SIMGRID, "/tmp/hapt-emit-none"), HAPT_ERR_INPUT);
    CHECK_FAILS(hapt_emit_write(plan, NULL, HAPT_EMIT_SIMGRID, "/dev/null/traces"), HAPT_ERR_IO);
    plan->blocking = true;
    CHECK_FAILS(hapt_emit_write(plan, NULL, HAPT_EMIT_SIMGRID, "/tmp/hapt-emit-none"), HAPT_ERR_USAGE);
    CHECK(hapt_emit_format_parse("simgrid", &format) && format == HAPT_EMIT_SIMGRID);
    CHECK(hapt_emit_format_parse("chakra", &format) && format == HAPT_EMIT_CHAKRA);
    CHECK(!hapt_emit_format_parse("no", &format));
    CHECK(hapt_emit_is_own("rank.12.txt") && hapt_emit_is_own("rank.0.json") && hapt_emit_is_own("rank.3.et") &&
          hapt_emit_is_own("platform.xml"));
    CHECK(!hapt_emit_is_own("rank.01.txt") && !hapt_emit_is_own("rank.1.h5") && !hapt_emit_is_own("notes.txt"));
    hapt_arena_release(&arena);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(chakra_is_the_simulated_step);
    RUN(refusals);
    return test_finish();
}
