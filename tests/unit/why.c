/* Rivals compared with an enumeration of every plan by kind; limits by hand; no rival is better than the plan. */
#include "hapt/search.h"
#include "hapt/rivals.h"
#include "random_profile.h"

enum { MOST_STAGES = 8, MOST_LAYERS = 8, ORDERS = 625, MOST_CUTS = 3 };

/* The least latency of each kind of plan. An order is its subclusters as digits in base five, counted from one. */
struct least {
    double of_order[ORDERS];
    double of_cut[ORDERS][MOST_CUTS][MOST_LAYERS]; /* the k-th boundary between subclusters at this layer */
    double lifted_s;                               /* without memory limits */
    double busy_s, all_s;                          /* all devices used; any number used */
    double split_s, joined_s;                      /* one stage of the plan split; two stages joined */
};

struct walk {
    const struct hapt_profile *profile;
    struct hapt_search_options options;
    int stages;
    const struct hapt_plan *plan; /* the optimum */
    struct {
        int first, end, subcluster, n, m;
        double time_s, parameter_bytes, activation_bytes;
    } stage[MOST_STAGES];
    int used[4]; /* devices of each subcluster */
    struct least *least;
};

static bool at_most(double a, double b)
{
    return a <= b + 1e-12 * fmax(fabs(a), fabs(b));
}

static double boundary_s(const struct walk *walk, int i)
{
    if (i == walk->stages - 1) return 0;
    const struct hapt_profile *profile = walk->profile;
    const int link = walk->stage[i].subcluster * profile->cluster_count + walk->stage[i + 1].subcluster;
    return profile->link_latency[link] +
           profile->boundary_bytes[walk->stage[i].end - 1] / profile->link_bandwidth[link];
}

static int launches(const struct walk *walk, int i, double t_max_s)
{
    const int B = walk->options.microbatches;
    long count = 1;
    if (walk->options.schedule == HAPT_SCHEDULE_GPIPE) return B;
    for (int k = i; k < walk->stages - 1; k++) {
        const double c = boundary_s(walk, k);
        if (walk->options.schedule == HAPT_SCHEDULE_1F1B)
            count += 1;
        else if (walk->options.schedule == HAPT_SCHEDULE_EAGER)
            count += 2;
        else
            count += at_most(c, walk->options.hide_threshold * t_max_s) ? 1 : at_most(c, t_max_s / 2) ? 2 : 3;
    }
    return count < B ? (int)count : B;
}

static bool runs_at(const struct walk *walk, double t_max_s, bool lifted)
{
    for (int i = 0; i < walk->stages; i++) {
        const double memory = walk->profile->cluster[walk->stage[i].subcluster].device_memory_bytes;
        const double need =
            walk->stage[i].parameter_bytes + launches(walk, i, t_max_s) * walk->stage[i].activation_bytes;
        if (!at_most(walk->stage[i].time_s, t_max_s) || !at_most(boundary_s(walk, i), t_max_s)) return false;
        if (!lifted && !at_most(need, memory)) return false;
    }
    return true;
}

/* Plans of these stages. Their t_max is one of their own times or thresholds. */
static double least_latency(const struct walk *walk, bool lifted)
{
    double sum_s = 0, best_s = INFINITY;
    for (int i = 0; i < walk->stages; i++) sum_s += walk->stage[i].time_s + 2 * boundary_s(walk, i);
    for (int i = 0; i < walk->stages; i++) {
        const double c = boundary_s(walk, i),
                     t_max[4] = {walk->stage[i].time_s, c, 2 * c, c / walk->options.hide_threshold};
        for (int k = 0; k < 4; k++)
            if (isfinite(t_max[k]) && runs_at(walk, t_max[k], lifted))
                best_s = fmin(best_s, sum_s + (walk->options.microbatches - 1) * t_max[k]);
    }
    return best_s;
}

static bool same_submesh(const struct walk *walk, int i, const struct hapt_plan_stage *stage)
{
    return walk->stage[i].subcluster == stage->submesh->subcluster[0] && walk->stage[i].n == stage->submesh->nodes &&
           walk->stage[i].m == stage->submesh->devices_per_node;
}

/* Are these submeshes those of the plan, except that `here` of them replace `there` of the plan's, all in one
 * subcluster? */
static bool neighbours(const struct walk *walk, int here, int there)
{
    const struct hapt_plan *plan = walk->plan;
    if (walk->stages - here != plan->stage_count - there) return false;
    for (int i = 0; i + here <= walk->stages; i++) {
        bool fits = true;
        const int c = plan->stage[i].submesh->subcluster[0];
        for (int k = 0; k < i; k++) fits &= same_submesh(walk, k, &plan->stage[k]);
        for (int k = i; k < i + there; k++) fits &= plan->stage[k].submesh->subcluster[0] == c;
        for (int k = i; k < i + here; k++) fits &= walk->stage[k].subcluster == c;
        for (int k = i + here; k < walk->stages; k++) fits &= same_submesh(walk, k, &plan->stage[k + there - here]);
        if (fits) return true;
    }
    return false;
}

static void judge(const struct walk *walk)
{
    struct least *least = walk->least;
    const double latency_s = least_latency(walk, false);
    int order = 0, cuts = 0, cut[MOST_STAGES];
    bool busy = true;
    for (int i = 0; i < walk->stages; i++) {
        if (i > 0 && walk->stage[i].subcluster == walk->stage[i - 1].subcluster) continue;
        if (i > 0) cut[cuts++] = walk->stage[i].first;
        order = 5 * order + 1 + walk->stage[i].subcluster;
    }
    for (int c = 0; c < walk->profile->cluster_count; c++)
        busy &= walk->used[c] == walk->profile->cluster[c].nodes * walk->profile->cluster[c].devices_per_node;
    /* with --use-all-devices a plan on every subcluster uses every device; a plan on fewer may leave some idle */
    int count = cuts + 1;
    if (busy || !walk->options.use_all_devices) {
        if (neighbours(walk, 2, 1)) least->split_s = fmin(least->split_s, latency_s);
        if (neighbours(walk, 1, 2)) least->joined_s = fmin(least->joined_s, latency_s);
    }
    least->lifted_s =
        fmin(least->lifted_s, walk->options.use_all_devices && !busy ? INFINITY : least_latency(walk, true));
    least->all_s = fmin(least->all_s, latency_s);
    if (busy) least->busy_s = fmin(least->busy_s, latency_s);
    if (walk->options.use_all_devices && count == walk->profile->cluster_count && !busy) return;
    least->of_order[order] = fmin(least->of_order[order], latency_s);
    for (int k = 0; k < cuts; k++) least->of_cut[order][k][cut[k]] = fmin(least->of_cut[order][k][cut[k]], latency_s);
}

static void extend(struct walk *walk, int layer, int current)
{
    const struct hapt_profile *profile = walk->profile;
    if (layer == profile->layer_count) {
        judge(walk);
        return;
    }
    for (int c = 0; c < profile->cluster_count; c++) {
        const struct hapt_profile_cluster *cluster = &profile->cluster[c];
        if (c != current && walk->used[c] > 0) continue;
        for (int s = 0; s < cluster->submesh_count; s++) {
            const int devices = cluster->submesh[s].n * cluster->submesh[s].m;
            if (walk->used[c] + devices > cluster->nodes * cluster->devices_per_node) continue;
            for (int end = layer + 1; end <= profile->layer_count; end++) {
                const size_t cell = hapt_profile_index(profile, s, layer, end - 1);
                if (!isfinite(cluster->stage_time[cell])) continue;
                const int i = walk->stages++;
                walk->stage[i].first = layer, walk->stage[i].end = end, walk->stage[i].subcluster = c;
                walk->stage[i].n = cluster->submesh[s].n, walk->stage[i].m = cluster->submesh[s].m;
                walk->stage[i].time_s =
                    cluster->stage_time[cell] +
                    (cluster->step_time ? cluster->step_time[cell] : 0) / walk->options.microbatches;
                walk->stage[i].parameter_bytes = cluster->parameter_bytes[cell];
                walk->stage[i].activation_bytes = cluster->activation_bytes[cell];
                walk->used[c] += devices;
                extend(walk, end, c);
                walk->used[c] -= devices;
                walk->stages--;
            }
        }
    }
}

static struct least *enumerate(const struct hapt_profile *profile, const struct hapt_search_options *options,
                               const struct hapt_plan *plan, struct hapt_arena *arena)
{
    struct least *least = hapt_arena_alloc(arena, 1, sizeof *least);
    struct walk walk = {.profile = profile, .options = *options, .plan = plan, .least = least};
    for (int order = 0; order < ORDERS; order++) {
        least->of_order[order] = INFINITY;
        for (int k = 0; k < MOST_CUTS; k++)
            for (int layer = 0; layer < MOST_LAYERS; layer++) least->of_cut[order][k][layer] = INFINITY;
    }
    least->lifted_s = least->busy_s = least->all_s = least->split_s = least->joined_s = INFINITY;
    extend(&walk, 0, -1);
    return least;
}

struct visit {
    int count, subcluster[4], cut[4];
};

static struct visit visit_of(const struct hapt_plan *plan)
{
    struct visit visit = {0};
    for (int i = 0; i < plan->stage_count; i++) {
        if (i > 0 && plan->stage[i].submesh->subcluster[0] == plan->stage[i - 1].submesh->subcluster[0]) continue;
        if (i > 0) visit.cut[visit.count - 1] = plan->stage[i].first_layer;
        visit.subcluster[visit.count++] = plan->stage[i].submesh->subcluster[0];
    }
    return visit;
}

static int code_of(const int *subcluster, int count)
{
    int code = 0;
    for (int k = 0; k < count; k++) code = 5 * code + 1 + subcluster[k];
    return code;
}

static bool order_has(int order, int c)
{
    for (; order > 0; order /= 5)
        if (order % 5 == c + 1) return true;
    return false;
}

/* The enumeration's value for a restriction, given its text. NAN: unknown text. */
static double expected(const struct least *least, const struct hapt_profile *profile, const struct hapt_plan *plan,
                       const char *what)
{
    const struct visit visit = visit_of(plan);
    const int order = code_of(visit.subcluster, visit.count);
    int a = 0, b = 0, c = 0, d = 0, length = 0;
    double best_s = INFINITY;
    if (strcmp(what, "more memory") == 0) return least->lifted_s;
    if (strcmp(what, "a stage split in two") == 0) return least->split_s;
    if (strcmp(what, "two stages joined") == 0) return least->joined_s;
    if (strcmp(what, "every device used") == 0) return least->busy_s;
    if (strcmp(what, "devices may stay idle") == 0) return least->all_s;
    if (sscanf(what, "sub%d alone%n", &a, &length) == 1 && what[length] == '\0' && length)
        return least->of_order[a + 1];
    if (sscanf(what, "without sub%d", &a) == 1) {
        for (int k = 1; k < ORDERS; k++)
            if (!order_has(k, a)) best_s = fmin(best_s, least->of_order[k]);
        return best_s;
    }
    if (sscanf(what, "with sub%d too", &a) == 1) {
        for (int place = 0; place <= visit.count; place++) {
            int with[5];
            for (int k = 0; k <= visit.count; k++) with[k] = k == place ? a : visit.subcluster[k - (k > place)];
            best_s = fmin(best_s, least->of_order[code_of(with, visit.count + 1)]);
        }
        return best_s;
    }
    char step[16];
    if (sscanf(what, "the boundary between sub%d and sub%d a layer %15s", &a, &b, step) == 3) {
        for (int k = 0; k + 1 < visit.count; k++)
            if (visit.subcluster[k] == a && visit.subcluster[k + 1] == b)
                return least->of_cut[order][k][visit.cut[k] + (step[0] == 'e' ? -1 : 1)];
        return NAN;
    }
    if (sscanf(what, "%15s bytes between sub%d and sub%d", step, &a, &b) == 3) {
        for (int k = 0; k + 1 < visit.count; k++) {
            if (visit.subcluster[k] != a || visit.subcluster[k + 1] != b) continue;
            const double here = profile->boundary_bytes[visit.cut[k] - 1];
            for (int cut = 1; cut < profile->layer_count; cut++) {
                const double there = profile->boundary_bytes[cut - 1];
                if (step[0] == 'f' ? !at_most(here, there) : !at_most(there, here))
                    best_s = fmin(best_s, least->of_cut[order][k][cut]);
            }
            return best_s;
        }
        return NAN;
    }
    const int count = sscanf(what, "sub%d before sub%d before sub%d before sub%d", &a, &b, &c, &d);
    const int listed[4] = {a, b, c, d};
    return count >= 2 ? least->of_order[code_of(listed, count)] : NAN;
}

static bool same_stages(const struct hapt_plan *a, const struct hapt_plan *b)
{
    bool same = a->stage_count == b->stage_count;
    for (int i = 0; same && i < a->stage_count; i++)
        same = a->stage[i].end_layer == b->stage[i].end_layer &&
               a->stage[i].submesh->subcluster[0] == b->stage[i].submesh->subcluster[0] &&
               a->stage[i].submesh->nodes == b->stage[i].submesh->nodes &&
               a->stage[i].submesh->devices_per_node == b->stage[i].submesh->devices_per_node;
    return same;
}

static bool listed(const struct hapt_rivals *rivals, const char *what)
{
    for (int i = 0; i < rivals->count; i++)
        if (strstr(rivals->rival[i].what, what)) return true;
    return false;
}

static long kinds[9];

static void check_rival(const struct least *least, const struct hapt_profile *profile,
                        const struct hapt_search_options *options, const struct hapt_plan *plan,
                        const struct hapt_rival *rival, unsigned long long seed)
{
    char pieces[512], *save = NULL;
    const double found_s = rival->plan ? rival->plan->latency_s : INFINITY;
    snprintf(pieces, sizeof pieces, "%s", rival->what);
    for (char *piece = strtok_r(pieces, ";", &save); piece; piece = strtok_r(NULL, ";", &save)) {
        piece += *piece == ' ';
        const double best_s = expected(least, profile, plan, piece);
        CHECK_MESSAGE(found_s == best_s || fabs(found_s - best_s) <= 1e-11 * best_s,
                      "seed %llu: %s takes %.17g, not %.17g", seed, piece, found_s, best_s);
        kinds[strstr(piece, "alone")                              ? 0
              : strstr(piece, " a layer ")                        ? 1
              : strstr(piece, "bytes")                            ? 2
              : strstr(piece, "memory")                           ? 3
              : strstr(piece, "idle") || strstr(piece, "every")   ? 4
              : strstr(piece, "too")                              ? 5
              : strstr(piece, "without")                          ? 6
              : strstr(piece, "split") || strstr(piece, "joined") ? 8
                                                                  : 7]++;
    }
    CHECK_MESSAGE(rival->reason && rival->reason[0], "seed %llu: %s gives no reason", seed, rival->what);
    if (!rival->plan) return;
    CHECK_MESSAGE(!rival->fits || !same_stages(rival->plan, plan), "seed %llu: %s is the plan itself", seed,
                  rival->what);
    CHECK_NEAR(rival->steady_s + rival->fill_s + rival->transfer_s, found_s - plan->latency_s, 1e-9 * plan->latency_s);
    CHECK_NEAR(rival->loss, found_s / plan->latency_s - 1, 1e-12);
    if (rival->fits && !strstr(rival->what, "idle") &&
        !(options->use_all_devices && visit_of(rival->plan).count < profile->cluster_count))
        CHECK_MESSAGE(rival->loss >= -1e-12, "seed %llu: %s beats the plan", seed, rival->what);
    if (rival->fits) return;
    CHECK_MESSAGE(rival->loss < 0 && rival->short_bytes > 0, "seed %llu: more memory buys nothing", seed);
    const struct hapt_plan_stage *tight = &rival->plan->stage[rival->short_stage];
    CHECK_NEAR(tight->memory_bytes - profile->cluster[tight->submesh->subcluster[0]].device_memory_bytes,
               rival->short_bytes, 1e-12);
}

static void compare_once(uint64_t start)
{
    uint64_t seed = start;
    struct hapt_arena arena;
    struct hapt_plan *plan;
    struct hapt_join_benefit *worth;
    struct hapt_rivals *rivals;
    hapt_arena_init(&arena);
    const struct hapt_profile *profile = random_profile(&seed, &arena);
    struct hapt_search_options options = random_options(&seed);
    options.may_fail = true;
    if (hapt_plan_search(MPI_COMM_SELF, profile, &options, &arena, &plan) == HAPT_OK) {
        const struct least *least = enumerate(profile, &options, plan, &arena);
        const struct visit visit = visit_of(plan);
        CHECK_OK(hapt_plan_join_benefit(&test_env, profile, &options, plan, &arena, &worth));
        CHECK_OK(hapt_plan_rivals(&test_env, profile, &options, plan, worth, false, &arena, &rivals));
        for (int i = 0; i < rivals->count; i++) {
            check_rival(least, profile, &options, plan, &rivals->rival[i], start);
            for (int j = 0; j < i; j++)
                CHECK_MESSAGE(!rivals->rival[i].plan || !rivals->rival[j].plan ||
                                  rivals->rival[i].fits != rivals->rival[j].fits ||
                                  !same_stages(rivals->rival[i].plan, rivals->rival[j].plan),
                              "seed %llu: one plan stands twice", (unsigned long long)start);
        }
        for (int c = 0; profile->cluster_count > 1 && c < profile->cluster_count; c++) {
            char what[32];
            snprintf(what, sizeof what, "sub%d alone", c);
            CHECK_MESSAGE((visit.count == 1 && visit.subcluster[0] == c) || listed(rivals, what), "seed %llu: no %s",
                          (unsigned long long)start, what);
            CHECK((worth->alone[c] != NULL) == isfinite(least->of_order[c + 1]));
        }
        char reverse[32];
        snprintf(reverse, sizeof reverse, "sub%d before sub%d", visit.subcluster[1], visit.subcluster[0]);
        CHECK_MESSAGE(visit.count != 2 || listed(rivals, reverse), "seed %llu: no %s", (unsigned long long)start,
                      reverse);
        CHECK_MESSAGE(listed(rivals, "split") == isfinite(least->split_s) &&
                          listed(rivals, "joined") == isfinite(least->joined_s),
                      "seed %llu: a stage more or less", (unsigned long long)start);
        CHECK_MESSAGE(!(least->lifted_s < plan->latency_s * (1 - 1e-9)) || listed(rivals, "more memory"),
                      "seed %llu: memory is not mentioned", (unsigned long long)start);
    }
    hapt_fail_reset();
    hapt_arena_release(&arena);
}

static void rivals_equal_enumeration(void)
{
    const char *wanted = getenv("HAPT_TEST_SEED");
    const int count = wanted ? 1 : test_long() ? 50000 : 3000;
    for (int i = 0; i < count; i++) compare_once(wanted ? strtoull(wanted, NULL, 10) : (uint64_t)i + 1);
    printf("rivals: %ld alone, %ld with a shifted boundary, %ld with other bytes, %ld with more memory, %ld by idle "
           "devices, "
           "%ld with and %ld without a subcluster, %ld by order, %ld with a stage more or less\n",
           kinds[0], kinds[1], kinds[2], kinds[3], kinds[4], kinds[5], kinds[6], kinds[7], kinds[8]);
    for (int k = 0; k < 9; k++) CHECK(wanted || kinds[k] > 0);
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    RUN(rivals_equal_enumeration);
    return test_finish();
}
