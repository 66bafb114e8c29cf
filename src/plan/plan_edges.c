/*
 * The messages between the stages of a plan. In: the profile's crossings and the stages. Out: plan->edge, with times,
 * links, and which messages are passed on.
 *
 * A plan has edges of its own only if they differ from those between neighbours: if a tensor goes past the next stage,
 * or if messages between different submeshes share a link. Neighbours always have an edge, also one without bytes, so
 * that the stages depend on each other in order.
 */
#include "hapt/plan.h"

#include <stdlib.h>
#include <string.h>

/* A stage passes tensors on to stages at most so far behind it. Each stage between adds a delay of a microbatch at
 * least, and waiting tensors occupy transfer slots. */
enum { MOST_STAGES_APART = HAPT_TRANSFER_SLOTS };

/* The subcluster of a stage; -1: several. */
static int home_of(const struct hapt_plan *plan, int stage)
{
    const struct hapt_plan_submesh *submesh = plan->stage[stage].submesh;
    return submesh->part_count == 1 ? submesh->subcluster[0] : -1;
}

int hapt_plan_source(const struct hapt_plan *plan, int producer, const int *reader, int index)
{
    const int home = home_of(plan, reader[index]);
    if (home < 0 || home == home_of(plan, producer)) return producer;
    for (int k = index - 1; k >= 0 && reader[k] + MOST_STAGES_APART >= reader[index]; k--)
        if (home_of(plan, reader[k]) == home && plan->stage[reader[k]].submesh != plan->stage[reader[index]].submesh)
            return reader[k];
    return producer;
}

/* Bytes from stage to stage, before they become a list. */
struct sums {
    int stages, relay_count, relay_capacity;
    double *bytes[2]; /* [stages][stages] forward, backward */
    struct hapt_schedule_relay *relay;
};

static enum hapt_status note_relay(struct hapt_plan *plan, struct sums *sums, struct hapt_schedule_relay relay)
{
    for (int k = 0; k < sums->relay_count; k++)
        if (memcmp(&sums->relay[k], &relay, sizeof relay) == 0) return HAPT_OK;
    if (sums->relay_count == sums->relay_capacity) {
        struct hapt_schedule_relay *grown;
        sums->relay_capacity = sums->relay_capacity ? 2 * sums->relay_capacity : 8;
        HAPT_NEW(grown, plan->arena, sums->relay_capacity);
        if (sums->relay_count) memcpy(grown, sums->relay, (size_t)sums->relay_count * sizeof *grown);
        sums->relay = grown;
    }
    sums->relay[sums->relay_count++] = relay;
    return HAPT_OK;
}

/* A stage that uses a tensor, in the order of computing. */
struct use {
    int stage;
    bool writes;
};

/* True if the stages of a crossing's first and last layer are no neighbours. */
static bool is_far(const struct hapt_crossings *crossings, int k, const int *stage_of)
{
    const int first = crossings->layer[crossings->start[k]], last = crossings->layer[crossings->start[k + 1] - 1];
    return abs(stage_of[last] - stage_of[first]) > 1;
}

/* The stages of a crossing's layers, each once. Returns their number. */
static int stages_of(const struct hapt_crossings *crossings, int k, const int *stage_of, struct use *use)
{
    int count = 0;
    for (int i = crossings->start[k]; i < crossings->start[k + 1]; i++) {
        const int stage = stage_of[crossings->layer[i]];
        if (count == 0 || stage != use[count - 1].stage) use[count++] = (struct use){stage, false};
        use[count - 1].writes = use[count - 1].writes || crossings->writes[i];
    }
    return count;
}

/* An activation goes from its producer to each reader, or from reader to reader. */
static enum hapt_status add_activation(struct hapt_plan *plan, struct sums *sums, double bytes, const struct use *use,
                                       int count, int *reader, int *source)
{
    for (int k = 0; k + 1 < count; k++) {
        reader[k] = use[k + 1].stage;
        const int from = source[k] = hapt_plan_source(plan, use[0].stage, reader, k);
        sums->bytes[0][from * sums->stages + reader[k]] += bytes;
        for (int via = 0; via < k && from != use[0].stage; via++)
            if (reader[via] == from)
                HAPT_TRY(note_relay(plan, sums, (struct hapt_schedule_relay){source[via], from, reader[k]}));
    }
    return HAPT_OK;
}

/* A gradient goes from each stage that writes it to those that read it, up to the next that adds to it. */
static void add_gradient(struct sums *sums, double bytes, const struct use *use, int count)
{
    int newest = use[0].stage;
    for (int k = 1; k < count; k++) {
        sums->bytes[1][newest * sums->stages + use[k].stage] += bytes;
        if (use[k].writes) newest = use[k].stage;
    }
}

/* stage_of [layer of the crossings] */
static enum hapt_status sum_crossings(const struct hapt_crossings *crossings, const int *stage_of,
                                      struct hapt_plan *plan, struct sums *sums, bool *far)
{
    const int S = plan->stage_count;
    int *reader;
    struct use *use;
    *far = false;
    for (int k = 0; k < crossings->count && !*far; k++) *far = is_far(crossings, k, stage_of);
    if (!*far) return HAPT_OK;
    HAPT_NEW(reader, plan->arena, 2 * S);
    HAPT_NEW(use, plan->arena, S);
    for (int d = 0; d < 2; d++) HAPT_NEW(sums->bytes[d], plan->arena, S * S);
    for (int k = 0; k < crossings->count; k++) {
        const int count = stages_of(crossings, k, stage_of, use);
        const bool backward = count > 1 && use[1].stage < use[0].stage;
        if (backward)
            add_gradient(sums, crossings->bytes[k], use, count);
        else
            HAPT_TRY(add_activation(plan, sums, crossings->bytes[k], use, count, reader, reader + S));
    }
    return HAPT_OK;
}

/* The bytes of a message between neighbours without sums. */
static double boundary_bytes(const struct hapt_profile *profile, const struct hapt_plan *plan, int from, int to)
{
    return profile->boundary_bytes[plan->stage[from < to ? from : to].end_layer - 1];
}

/* Lists the edges in the order of hapt_schedule_edges. Without sums: those of neighbours. */
static enum hapt_status list_edges(const struct hapt_profile *profile, const struct sums *sums, struct hapt_plan *plan)
{
    const int S = plan->stage_count;
    int count = 0;
    for (int pass = 0; pass < 2; pass++) {
        count = 0;
        for (int d = 0; d < 2; d++)
            for (int from = 0; from < S; from++)
                for (int to = d ? 0 : from + 1; to < (d ? from : S); to++) {
                    const bool neighbours = to == from + 1 || from == to + 1;
                    const double bytes = sums->bytes[d] ? sums->bytes[d][from * S + to]
                                         : neighbours   ? boundary_bytes(profile, plan, from, to)
                                                        : 0;
                    if (!neighbours && bytes == 0) continue;
                    if (pass == 1)
                        plan->edge[count] =
                            (struct hapt_plan_edge){.edge = {from, to, d, 0}, .bytes = bytes, .share = 1};
                    count++;
                }
        if (pass == 0) HAPT_NEW(plan->edge, plan->arena, count);
    }
    plan->edge_count = count;
    plan->relay_count = sums->relay_count;
    plan->relay = sums->relay;
    return HAPT_OK;
}

static double transfer_s(const struct hapt_profile *profile, const struct hapt_plan *plan,
                         const struct hapt_plan_edge *at, double bytes, int link[2])
{
    return hapt_profile_transfer_s(profile, bytes, hapt_plan_stage_subclusters(&plan->stage[at->edge.from]),
                                   hapt_plan_stage_subclusters(&plan->stage[at->edge.to]), link);
}

/* Finds links and times. Submeshes that send over one link in the same direction share its bandwidth in proportion to
 * their bytes. So all of them need the same time for a microbatch. */
static void price_edges(const struct hapt_profile *profile, struct hapt_plan *plan)
{
    int link[2];
    for (int e = 0; e < plan->edge_count; e++) {
        struct hapt_plan_edge *at = &plan->edge[e];
        const double alone_s = transfer_s(profile, plan, at, at->bytes, link);
        at->edge.link = link[0] == link[1] ? 0 : 1 + link[0] * profile->cluster_count + link[1];
        at->time_s = at->bytes > 0 ? alone_s : 0;
    }
    for (int e = 0; e < plan->edge_count; e++) {
        struct hapt_plan_edge *at = &plan->edge[e];
        double all = 0, own = 0;
        if (at->edge.link == 0) continue;
        for (int k = 0; k < plan->edge_count; k++) {
            const struct hapt_plan_edge *other = &plan->edge[k];
            if (other->edge.link != at->edge.link) continue;
            all += other->bytes;
            if (plan->stage[other->edge.from].submesh == plan->stage[at->edge.from].submesh) own += other->bytes;
        }
        if (own > 0) at->share = own / all;
        if (at->bytes > 0 && at->share < 1) at->time_s = transfer_s(profile, plan, at, at->bytes / at->share, link);
    }
}

/* True if two messages between neighbours go over one link in the same direction, but not between the same submeshes.
 */
static bool neighbours_share_a_link(const struct hapt_plan *plan)
{
    const int messages = 2 * (plan->stage_count - 1);
    for (int k = 0; k < messages; k++) {
        const int from = (k + 1) / 2, to = k / 2 + (k % 2 == 0); /* 0 to 1, 1 to 0, 1 to 2, 2 to 1 ... */
        const int there[2] = {home_of(plan, from), home_of(plan, to)};
        if (there[0] < 0 || there[1] < 0 || there[0] == there[1]) continue;
        for (int other = 0; other < k; other++) {
            const int its_from = (other + 1) / 2, its_to = other / 2 + (other % 2 == 0);
            if (home_of(plan, its_from) != there[0] || home_of(plan, its_to) != there[1]) continue;
            if (plan->stage[from].submesh != plan->stage[its_from].submesh ||
                plan->stage[to].submesh != plan->stage[its_to].submesh)
                return true;
        }
    }
    return false;
}

/* True if the messages are those of a plan without edges of its own. They are if each stage passes a far tensor on to
 * the next. */
static bool are_neighbours(const struct hapt_plan *plan)
{
    bool alike = plan->relay_count == 0 && !neighbours_share_a_link(plan);
    for (int e = 0; e < plan->edge_count && alike; e++) {
        const struct hapt_plan_edge *at = &plan->edge[e];
        const int low = at->edge.from < at->edge.to ? at->edge.from : at->edge.to;
        alike = abs(at->edge.from - at->edge.to) == 1 && at->time_s == plan->stage[low].comm_s;
    }
    return alike;
}

static void drop_edges(struct hapt_plan *plan)
{
    plan->edge_count = plan->relay_count = 0;
    plan->edge = NULL;
    plan->relay = NULL;
}

enum hapt_status hapt_plan_find_edges(const struct hapt_profile *profile, struct hapt_plan *plan)
{
    struct sums sums = {.stages = plan->stage_count};
    bool far = false;
    int *stage_of;
    drop_edges(plan);
    if (plan->stage_count < 3) return HAPT_OK; /* all are neighbours */
    if (profile->crossings) {
        HAPT_NEW(stage_of, plan->arena, plan->layer_count);
        for (int i = 0; i < plan->stage_count; i++)
            for (int l = plan->stage[i].first_layer; l < plan->stage[i].end_layer; l++) stage_of[l] = i;
        HAPT_TRY(sum_crossings(profile->crossings, stage_of, plan, &sums, &far));
    }
    if (!far && !neighbours_share_a_link(plan)) return HAPT_OK;
    HAPT_TRY(list_edges(profile, &sums, plan));
    price_edges(profile, plan);
    if (are_neighbours(plan)) drop_edges(plan);
    return HAPT_OK;
}

/* The crossings of the model between the stages, as if these were layers; NULL: all are between neighbours. */
static enum hapt_status find_crossings(const struct hapt_graph *graph, const struct hapt_plan *plan,
                                       struct hapt_arena *scratch, const struct hapt_crossings **crossings)
{
    struct hapt_layers stages = {.count = plan->stage_count};
    HAPT_NEW(stages.end_op, scratch, plan->stage_count);
    for (int i = 0; i < plan->stage_count; i++) stages.end_op[i] = plan->stage[i].end_op;
    return hapt_crossings_find(graph, &stages, scratch, scratch, crossings);
}

static enum hapt_status find_model_edges(const struct hapt_graph *graph, struct hapt_plan *plan,
                                         struct hapt_arena *scratch)
{
    struct sums sums = {.stages = plan->stage_count};
    const struct hapt_crossings *crossings;
    bool far = false;
    int *stage_of;
    HAPT_TRY(find_crossings(graph, plan, scratch, &crossings));
    if (!crossings) return HAPT_OK;
    HAPT_NEW(stage_of, scratch, plan->stage_count);
    for (int i = 0; i < plan->stage_count; i++) stage_of[i] = i;
    HAPT_TRY(sum_crossings(crossings, stage_of, plan, &sums, &far));
    if (!far) return HAPT_OK;
    HAPT_TRY(list_edges(NULL, &sums, plan));
    for (int e = 0; e < plan->edge_count; e++) {
        struct hapt_plan_edge *edge = &plan->edge[e];
        const int low = edge->edge.from < edge->edge.to ? edge->edge.from : edge->edge.to;
        edge->time_s = abs(edge->edge.from - edge->edge.to) == 1 ? plan->stage[low].comm_s : 0;
    }
    if (are_neighbours(plan)) drop_edges(plan);
    return HAPT_OK;
}

enum hapt_status hapt_plan_find_model_edges(const struct hapt_graph *graph, struct hapt_plan *plan)
{
    struct hapt_arena scratch;
    HAPT_ASSERT(plan->edge_count == 0);
    hapt_arena_init(&scratch);
    const enum hapt_status status = find_model_edges(graph, plan, &scratch);
    hapt_arena_release(&scratch);
    return status;
}

enum hapt_status hapt_plan_add_edges(const struct hapt_plan *plan, struct hapt_arena *arena,
                                     struct hapt_schedule_options *options)
{
    struct hapt_schedule_edge *edge;
    if (plan->edge_count == 0) return HAPT_OK;
    HAPT_NEW(edge, arena, plan->edge_count);
    for (int e = 0; e < plan->edge_count; e++)
        if (!hapt_plan_drops_edge(plan, &plan->edge[e])) edge[options->edge_count++] = plan->edge[e].edge;
    options->edge = edge;
    options->relay_count = plan->relay_count;
    options->relay = plan->relay;
    return HAPT_OK;
}

double hapt_plan_link_share(const struct hapt_plan *plan, int from, int to)
{
    for (int e = 0; e < plan->edge_count; e++)
        if (plan->edge[e].edge.from == from && plan->edge[e].edge.to == to) return plan->edge[e].share;
    return 1;
}

bool hapt_plan_has_edges(const struct hapt_plan *plan, const struct hapt_schedule *schedule)
{
    const struct hapt_schedule_options *options = &schedule->options;
    if (plan->edge_count == 0) return !schedule->edges.given;
    if (!schedule->edges.given || plan->relay_count != options->relay_count) return false;
    int sent = 0;
    for (int e = 0; e < plan->edge_count; e++) {
        const struct hapt_schedule_edge *a = &plan->edge[e].edge, *b = &schedule->edges.edge[sent];
        if (hapt_plan_drops_edge(plan, &plan->edge[e])) continue;
        if (sent++ == schedule->edges.count || a->from != b->from || a->to != b->to || a->backward != b->backward ||
            a->link != b->link)
            return false;
    }
    if (sent != schedule->edges.count) return false;
    return plan->relay_count == 0 ||
           memcmp(plan->relay, options->relay, (size_t)plan->relay_count * sizeof *plan->relay) == 0;
}

#define BAD(...) hapt_fail(HAPT_ERR_INPUT, "create the plan again with `hapt plan`", "plan: " __VA_ARGS__)

static bool has_edge(const struct hapt_plan *plan, int from, int to)
{
    for (int e = 0; e < plan->edge_count; e++)
        if (plan->edge[e].edge.from == from && plan->edge[e].edge.to == to) return true;
    return false;
}

enum hapt_status hapt_plan_check_edges(const struct hapt_plan *plan)
{
    const int S = plan->stage_count;
    for (int e = 0; e < plan->edge_count; e++) {
        const struct hapt_plan_edge *at = &plan->edge[e];
        const int from = at->edge.from, to = at->edge.to;
        if (from < 0 || from >= S || to < 0 || to >= S || from == to)
            return BAD("a message goes from stage %d to stage %d, but there are %d stages", from, to, S);
        if (!(at->time_s >= 0 && isfinite(at->time_s)) || !(at->bytes >= 0 && isfinite(at->bytes)) ||
            at->edge.link < 0 || !(at->share > 0 && at->share <= 1))
            return BAD("a message from stage %d to stage %d takes %g s for %g bytes over a share of %g of link %d",
                       from, to, at->time_s, at->bytes, at->share, at->edge.link);
        if (e > 0 && hapt_schedule_compare_edges(&at[-1].edge, &at->edge) >= 0)
            return BAD("the messages from stage %d are not in order", from);
    }
    for (int i = 0; i + 1 < S && plan->edge_count > 0; i++)
        if (!has_edge(plan, i, i + 1) || !has_edge(plan, i + 1, i))
            return BAD("no message joins stages %d and %d", i, i + 1);
    for (int k = 0; k < plan->relay_count; k++) {
        const struct hapt_schedule_relay *relay = &plan->relay[k];
        if (relay->from >= relay->via || relay->via >= relay->to || !has_edge(plan, relay->from, relay->via) ||
            !has_edge(plan, relay->via, relay->to))
            return BAD("stage %d passes on what no message from stage %d to stage %d brings or takes", relay->via,
                       relay->from, relay->to);
    }
    return HAPT_OK;
}
