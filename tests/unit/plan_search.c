/*
 * The search compared with brute force: every plan of small random profiles, priced from its definition at every t_max.
 * The two share no code except the profile.
 */
#include "random_profile.h"
#include "hapt/search.h"

enum { MOST_STAGES = 8, MOST_T_MAX = 4096 };

/* The devices that a stage uses of one subcluster, and the memory of each. */
struct brute_part {
    int subcluster, devices;
    double parameter_bytes, activation_bytes, memory_bytes;
};

struct brute_stage {
    int first, end, kind, n, m, tp; /* kind: subcluster, or C + index of the mixed stage */
    int recompute, weights_at, row;
    double time_s;
    int parts;
    struct brute_part part[4];
};

struct brute_plan {
    int stages;
    struct brute_stage stage[MOST_STAGES];
    double t_max_s, latency_s;
};

struct brute {
    const struct hapt_profile *profile;
    struct hapt_search_options options;
    double *t_max;
    int t_max_count;
    struct brute_plan plan; /* the plan under construction */
    int used[4];            /* devices used of each subcluster */
    double least_s;         /* first pass */
    bool second_pass, found;
    struct brute_plan best; /* second pass */
    long plans;
};

static bool at_most(double a, double b)
{
    return a <= b + 1e-12 * fmax(fabs(a), fabs(b));
}

/* The cost of a boundary. Every subcluster of both sides uses its best link to the other side, and the slowest of these
 * decides. */
static double transfer_s(const struct hapt_profile *profile, int layer, const struct brute_stage *a,
                         const struct brute_stage *b)
{
    double slowest_s = 0;
    for (int side = 0; side < 2; side++) {
        const struct brute_stage *these = side ? b : a, *those = side ? a : b;
        for (int i = 0; i < these->parts; i++) {
            double best_s = INFINITY;
            for (int k = 0; k < those->parts; k++) {
                const int link = these->part[i].subcluster * profile->cluster_count + those->part[k].subcluster;
                best_s = fmin(best_s, profile->link_latency[link] +
                                          profile->boundary_bytes[layer] / profile->link_bandwidth[link]);
            }
            slowest_s = fmax(slowest_s, best_s);
        }
    }
    return slowest_s;
}

static double boundary_s(const struct brute *brute, int i)
{
    const struct brute_stage *stage = &brute->plan.stage[i];
    return i == brute->plan.stages - 1 ? 0 : transfer_s(brute->profile, stage->end - 1, stage, stage + 1);
}

static bool uses(const struct brute_plan *plan, int stage, int c)
{
    for (int k = 0; k < plan->stage[stage].parts; k++)
        if (plan->stage[stage].part[k].subcluster == c) return true;
    return false;
}

/* The rule of mixed stages, from its definition. The stages of a subcluster are neighbours. The stages on one side of a
 * mixed stage use at most one of its subclusters, and the two sides use different ones. */
static bool well_ordered(const struct brute_plan *plan, int C)
{
    for (int i = 0; i < plan->stages; i++) {
        int shared[2] = {0, 0};
        for (int c = 0; c < C; c++) {
            bool side[2] = {false, false};
            if (!uses(plan, i, c)) continue;
            for (int k = 0; k < plan->stages; k++) {
                if (k == i || !uses(plan, k, c)) continue;
                side[k > i] = true;
                for (int between = k < i ? k : i; between < (k < i ? i : k); between++)
                    if (!uses(plan, between, c)) return false;
            }
            if (plan->stage[i].parts > 1 && side[0] && side[1]) return false;
            shared[0] += side[0];
            shared[1] += side[1];
        }
        if (plan->stage[i].parts > 1 && (shared[0] > 1 || shared[1] > 1)) return false;
    }
    return true;
}

/* The launch count of stage i, from the definitions of the schedules. */
static int launches(const struct brute *brute, int i, double t_max_s)
{
    const int S = brute->plan.stages, B = brute->options.microbatches;
    long count = 1;
    if (brute->options.schedule == HAPT_SCHEDULE_GPIPE) return B;
    if (brute->options.schedule == HAPT_SCHEDULE_1F1B) count = S - i;
    if (brute->options.schedule == HAPT_SCHEDULE_EAGER) count = 2 * (S - i) - 1;
    if (brute->options.schedule == HAPT_SCHEDULE_H1F1B) {
        for (int k = i; k < S - 1; k++) {
            const double c = boundary_s(brute, k);
            count += at_most(c, brute->options.hide_threshold * t_max_s) ? 1 : at_most(c, t_max_s / 2) ? 2 : 3;
        }
    }
    return count < B ? (int)count : B;
}

static bool feasible(const struct brute *brute, double t_max_s)
{
    for (int i = 0; i < brute->plan.stages; i++) {
        const struct brute_stage *stage = &brute->plan.stage[i];
        if (!at_most(stage->time_s, t_max_s) || !at_most(boundary_s(brute, i), t_max_s)) return false;
        for (int k = 0; k < stage->parts; k++)
            if (!at_most(stage->part[k].parameter_bytes + launches(brute, i, t_max_s) * stage->part[k].activation_bytes,
                         stage->part[k].memory_bytes))
                return false;
    }
    return true;
}

static int compare_plans(const struct brute_plan *a, const struct brute_plan *b)
{
    if (a->t_max_s != b->t_max_s) return a->t_max_s < b->t_max_s ? -1 : 1;
    if (a->stages != b->stages) return a->stages - b->stages;
    for (int i = 0; i < a->stages; i++) {
        const struct brute_stage *x = &a->stage[i], *y = &b->stage[i];
        const int differences[] = {x->first - y->first, x->end - y->end, x->kind - y->kind, x->n - y->n,
                                   x->m - y->m,         x->tp - y->tp,   x->row - y->row};
        for (int k = 0; k < 7; k++)
            if (differences[k]) return differences[k];
    }
    return 0;
}

static void judge(struct brute *brute)
{
    double sum_s = 0;
    if (!well_ordered(&brute->plan, brute->profile->cluster_count)) return;
    brute->plans++;
    if (brute->options.use_all_devices)
        for (int c = 0; c < brute->profile->cluster_count; c++)
            if (brute->used[c] != brute->profile->cluster[c].nodes * brute->profile->cluster[c].devices_per_node)
                return;
    for (int i = 0; i < brute->plan.stages; i++) sum_s += brute->plan.stage[i].time_s + 2 * boundary_s(brute, i);
    for (int k = 0; k < brute->t_max_count; k++) {
        const double latency_s = sum_s + (brute->options.microbatches - 1) * brute->t_max[k];
        if (!feasible(brute, brute->t_max[k])) continue;
        if (!brute->second_pass) {
            brute->least_s = fmin(brute->least_s, latency_s);
        } else if (at_most(latency_s, brute->least_s)) {
            brute->plan.t_max_s = brute->t_max[k];
            brute->plan.latency_s = latency_s;
            if (!brute->found || compare_plans(&brute->plan, &brute->best) < 0) brute->best = brute->plan;
            brute->found = true;
        }
        return; /* a larger t_max is never better, and loses ties */
    }
}

static void extend(struct brute *brute, int layer);

/* Adds a stage, if it has enough devices and its subclusters have not been left before. */
static void extend_by(struct brute *brute, const struct brute_stage *stage)
{
    const struct hapt_profile *profile = brute->profile;
    for (int k = 0; k < stage->parts; k++) {
        const struct brute_part *part = &stage->part[k];
        const struct hapt_profile_cluster *cluster = &profile->cluster[part->subcluster];
        if (brute->used[part->subcluster] + part->devices > cluster->nodes * cluster->devices_per_node) return;
        if (brute->used[part->subcluster] > 0 && !uses(&brute->plan, brute->plan.stages - 1, part->subcluster)) return;
    }
    brute->plan.stage[brute->plan.stages++] = *stage;
    for (int k = 0; k < stage->parts; k++) brute->used[stage->part[k].subcluster] += stage->part[k].devices;
    extend(brute, stage->end);
    for (int k = 0; k < stage->parts; k++) brute->used[stage->part[k].subcluster] -= stage->part[k].devices;
    brute->plan.stages--;
}

static void extend_mixed(struct brute *brute, int layer, int group)
{
    const struct hapt_profile *profile = brute->profile;
    const struct hapt_profile_mixed *mixed = &profile->mixed[group];
    for (int end = layer + 1; end <= profile->layer_count; end++) {
        const size_t cell = hapt_profile_index(profile, 0, layer, end - 1);
        if (!isfinite(mixed->stage_time[cell])) continue;
        const double step_s = mixed->step_time ? mixed->step_time[cell] : 0;
        struct brute_stage stage = {.first = layer,
                                    .end = end,
                                    .kind = profile->cluster_count + group,
                                    .time_s = mixed->stage_time[cell] + step_s / brute->options.microbatches,
                                    .parts = mixed->count};
        for (int k = 0; k < mixed->count; k++) {
            const size_t row = hapt_profile_index(profile, mixed->memory_rows == 1 ? 0 : k, layer, end - 1);
            stage.part[k] = (struct brute_part){mixed->cluster[k], mixed->devices[k], mixed->parameter_bytes[row],
                                                mixed->activation_bytes[row],
                                                profile->cluster[mixed->cluster[k]].device_memory_bytes};
        }
        extend_by(brute, &stage);
    }
}

/* Tries every next stage. */
static void extend(struct brute *brute, int layer)
{
    const struct hapt_profile *profile = brute->profile;
    if (layer == profile->layer_count) {
        judge(brute);
        return;
    }
    for (int c = 0; c < profile->cluster_count; c++) {
        const struct hapt_profile_cluster *cluster = &profile->cluster[c];
        for (int s = 0; s < cluster->submesh_count; s++) {
            const struct hapt_submesh *submesh = &cluster->submesh[s];
            for (int end = layer + 1; end <= profile->layer_count; end++) {
                const size_t cell = hapt_profile_index(profile, s, layer, end - 1);
                if (!isfinite(cluster->stage_time[cell])) continue;
                const double step_s = cluster->step_time ? cluster->step_time[cell] : 0;
                const struct brute_stage stage = {layer,
                                                  end,
                                                  c,
                                                  submesh->n,
                                                  submesh->m,
                                                  submesh->tp,
                                                  submesh->recompute,
                                                  submesh->weights_at,
                                                  s,
                                                  cluster->stage_time[cell] + step_s / brute->options.microbatches,
                                                  1,
                                                  {{c, submesh->n * submesh->m, cluster->parameter_bytes[cell],
                                                    cluster->activation_bytes[cell], cluster->device_memory_bytes}}};
                extend_by(brute, &stage);
            }
        }
    }
    for (int k = 0; k < profile->mixed_count; k++) extend_mixed(brute, layer, k);
}

static int compare_reals(const void *left, const void *right)
{
    const double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

/* Tries a stage that uses the subclusters of a kind. */
static struct brute_stage on(const struct hapt_profile *profile, int kind)
{
    const int C = profile->cluster_count;
    struct brute_stage stage = {.kind = kind, .parts = 1, .part = {{.subcluster = kind}}};
    if (kind < C) return stage;
    stage.parts = profile->mixed[kind - C].count;
    for (int k = 0; k < stage.parts; k++) stage.part[k].subcluster = profile->mixed[kind - C].cluster[k];
    return stage;
}

static void list_t_max(struct brute *brute, struct hapt_arena *arena)
{
    const struct hapt_profile *profile = brute->profile;
    const int C = profile->cluster_count, L = profile->layer_count;
    brute->t_max = hapt_arena_alloc(arena, MOST_T_MAX, sizeof *brute->t_max);
    for (int c = 0; c < C; c++) {
        const struct hapt_profile_cluster *cluster = &profile->cluster[c];
        for (int s = 0; s < cluster->submesh_count; s++) {
            for (int i = 0; i < L; i++) {
                for (int j = i; j < L; j++) {
                    const size_t cell = hapt_profile_index(profile, s, i, j);
                    const double step_s = cluster->step_time ? cluster->step_time[cell] : 0;
                    if (isfinite(cluster->stage_time[cell]))
                        brute->t_max[brute->t_max_count++] =
                            cluster->stage_time[cell] + step_s / brute->options.microbatches;
                }
            }
        }
    }
    for (int k = 0; k < profile->mixed_count; k++) {
        const struct hapt_profile_mixed *mixed = &profile->mixed[k];
        for (int i = 0; i < L; i++) {
            for (int j = i; j < L; j++) {
                const size_t cell = hapt_profile_index(profile, 0, i, j);
                const double step_s = mixed->step_time ? mixed->step_time[cell] : 0;
                if (isfinite(mixed->stage_time[cell]))
                    brute->t_max[brute->t_max_count++] = mixed->stage_time[cell] + step_s / brute->options.microbatches;
            }
        }
    }
    for (int from = 0; from < C + profile->mixed_count; from++)
        for (int to = 0; to < C + profile->mixed_count; to++)
            for (int layer = 0; layer < L - 1; layer++) {
                const struct brute_stage before = on(profile, from), behind = on(profile, to);
                const double comm_s = transfer_s(profile, layer, &before, &behind);
                brute->t_max[brute->t_max_count++] = comm_s;
                brute->t_max[brute->t_max_count++] = 2 * comm_s;
                if (brute->options.hide_threshold > 0)
                    brute->t_max[brute->t_max_count++] = comm_s / brute->options.hide_threshold;
            }
    CHECK_MESSAGE(brute->t_max_count <= MOST_T_MAX, "too many t_max values");
    qsort(brute->t_max, (size_t)brute->t_max_count, sizeof *brute->t_max, compare_reals);
}

/* True for the same choice of what is kept, or one that takes the same time. */
static bool keeps_same(const struct hapt_plan_stage *stage, const struct brute_stage *wanted)
{
    const bool same = stage->layout.recompute == wanted->recompute && stage->layout.weights_at == wanted->weights_at;
    return same || (at_most(stage->compute_s, wanted->time_s) && at_most(wanted->time_s, stage->compute_s));
}

static bool same_plan(const struct hapt_plan *plan, const struct brute_plan *best)
{
    bool same = plan->stage_count == best->stages && plan->t_max_s == best->t_max_s;
    for (int i = 0; same && i < best->stages; i++) {
        const struct hapt_plan_stage *stage = &plan->stage[i];
        const struct brute_stage *wanted = &best->stage[i];
        same = stage->first_layer == wanted->first && stage->end_layer == wanted->end &&
               stage->submesh->part_count == wanted->parts;
        if (same && !hapt_plan_is_mixed(stage))
            same = stage->submesh->subcluster[0] == wanted->kind && stage->submesh->nodes == wanted->n &&
                   stage->submesh->devices_per_node == wanted->m && stage->layout.tensor_parallel == wanted->tp &&
                   keeps_same(stage, wanted);
        for (int k = 0; same && hapt_plan_is_mixed(stage) && k < wanted->parts; k++)
            same = stage->submesh->subcluster[k] == wanted->part[k].subcluster &&
                   stage->submesh->devices[k] == wanted->part[k].devices;
    }
    return same;
}

static void print_difference(const struct hapt_plan *plan, const struct brute_plan *best)
{
    fprintf(stderr, "search: latency %.17g, t_max %.17g\n", plan->latency_s, plan->t_max_s);
    for (int i = 0; i < plan->stage_count; i++) {
        char submesh[64];
        fprintf(stderr, "  %d-%d@%s:%s\n", plan->stage[i].first_layer, plan->stage[i].end_layer,
                plan->stage[i].submesh->name, hapt_plan_stage_submesh(&plan->stage[i], submesh));
    }
    fprintf(stderr, "brute force: latency %.17g, t_max %.17g\n", best->latency_s, best->t_max_s);
    for (int i = 0; i < best->stages; i++)
        fprintf(stderr, "  %d-%d@%d:%dx%dt%d\n", best->stage[i].first, best->stage[i].end, best->stage[i].kind,
                best->stage[i].n, best->stage[i].m, best->stage[i].tp);
}

static long loose_cases; /* number of results that are proven not to be optimal */

/* A search that may stop early. Its plan is valid and no better than the optimum. Its gap is true, and at most the
 * requested one. */
static void compare_gap(const struct brute *brute, uint64_t start_seed, struct hapt_arena *arena)
{
    static const double gaps[] = {1e-3, 0.01, 0.1, 0.5};
    struct hapt_search_options options = brute->options;
    struct hapt_plan *plan = NULL;
    options.gap = gaps[start_seed % 4];
    const enum hapt_status status = hapt_plan_search(MPI_COMM_SELF, brute->profile, &options, arena, &plan);
    hapt_fail_reset();
    if (!CHECK_MESSAGE(status == HAPT_OK, "seed %llu: no plan with a gap", (unsigned long long)start_seed)) return;
    const double best_s = brute->best.latency_s, lower_s = plan->latency_s / (1 + plan->search.gap);
    CHECK_OK(hapt_plan_check(plan));
    CHECK_MESSAGE(plan->search.gap >= 0 && plan->search.gap <= options.gap * (1 + 1e-9), "seed %llu: gap %g of %g",
                  (unsigned long long)start_seed, plan->search.gap, options.gap);
    CHECK_MESSAGE(plan->latency_s >= best_s * (1 - 1e-12), "seed %llu: better than the optimum",
                  (unsigned long long)start_seed);
    CHECK_MESSAGE(lower_s <= best_s * (1 + 1e-12), "seed %llu: lower bound %.17g above the optimum %.17g",
                  (unsigned long long)start_seed, lower_s, best_s);
    for (int i = 0; i < plan->stage_count; i++)
        CHECK(at_most(plan->stage[i].memory_bytes, plan->stage[i].device_memory_bytes));
    loose_cases += plan->latency_s > best_s * (1 + 1e-9);
}

/* Plans over two or more subclusters with equal tables. */
static bool uses_twins(const struct hapt_plan *plan, const struct hapt_profile *profile)
{
    const size_t L = (size_t)profile->layer_count;
    for (int i = 0; i < plan->stage_count; i++) {
        for (int k = 0; k < i; k++) {
            const struct hapt_profile_cluster *a = &profile->cluster[plan->stage[i].submesh->subcluster[0]];
            const struct hapt_profile_cluster *b = &profile->cluster[plan->stage[k].submesh->subcluster[0]];
            if (hapt_plan_is_mixed(&plan->stage[i]) || hapt_plan_is_mixed(&plan->stage[k])) continue;
            if (a != b && a->submesh_count == b->submesh_count && a->device_memory_bytes == b->device_memory_bytes &&
                memcmp(a->stage_time, b->stage_time, (size_t)a->submesh_count * L * L * sizeof(double)) == 0)
                return true;
        }
    }
    return false;
}

static long mixed_cases, between_cases, several_cases;

/* Plans with mixed stages; with one between stages of its own subclusters; with more than one. */
static void count_mixed(const struct hapt_plan *plan)
{
    int mixed = 0, between = 0;
    for (int i = 0; i < plan->stage_count; i++) {
        const struct hapt_subclusters mine = hapt_plan_stage_subclusters(&plan->stage[i]);
        int sides = 0;
        if (mine.count == 1) continue;
        for (int k = 0; k < mine.count; k++) {
            sides += i > 0 && hapt_plan_stage_devices(&plan->stage[i - 1], mine.index[k]) > 0;
            sides += i + 1 < plan->stage_count && hapt_plan_stage_devices(&plan->stage[i + 1], mine.index[k]) > 0;
        }
        mixed++;
        between += sides == 2;
    }
    mixed_cases += mixed > 0;
    between_cases += between > 0;
    several_cases += mixed > 1;
}

static long kept_cases; /* plans with stages that recompute, or with weights on the host */
static long feasible_cases, twin_cases, link_cases, memory_cases, idle_cases, skip_cases;

static void count_kind(const struct hapt_plan *plan, const struct hapt_profile *profile)
{
    int used[4] = {0}, devices = 0, skipped = 0;
    feasible_cases++;
    count_mixed(plan);
    twin_cases += uses_twins(plan, profile);
    link_cases += strcmp(plan->limit, "link") == 0;
    memory_cases += strcmp(plan->limit, "memory") == 0;
    for (int i = 0; i < plan->stage_count; i++)
        for (int c = 0; c < profile->cluster_count; c++) used[c] += hapt_plan_stage_devices(&plan->stage[i], c);
    for (int c = 0; c < profile->cluster_count; c++) {
        devices += profile->cluster[c].nodes * profile->cluster[c].devices_per_node - used[c];
        skipped += used[c] == 0;
    }
    idle_cases += devices > 0;
    skip_cases += skipped > 0;
    bool kept = false;
    for (int i = 0; i < plan->stage_count; i++)
        kept = kept || plan->stage[i].layout.recompute > 0 || plan->stage[i].layout.weights_at > 0;
    kept_cases += kept;
}

enum kind_of_profile { SMALL, LONGER, MIXED };

static struct hapt_profile *some_profile(uint64_t *seed, enum kind_of_profile kind, struct hapt_arena *arena)
{
    if (kind == MIXED) return random_mixed_profile(seed, arena);
    return kind == LONGER ? random_profile_of(seed, 2, 8, arena) : random_profile(seed, arena);
}

static void compare_once(uint64_t start_seed, enum kind_of_profile kind)
{
    uint64_t seed = start_seed;
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    struct brute brute = {.least_s = INFINITY};
    brute.profile = some_profile(&seed, kind, &arena);
    brute.options = random_options(&seed);
    CHECK_MESSAGE(brute.profile->layer_count <= MOST_STAGES, "too many layers");
    int64_t candidates = 0;
    list_t_max(&brute, &arena);
    candidates = brute.t_max_count;
    extend(&brute, 0);
    brute.second_pass = true;
    if (isfinite(brute.least_s)) extend(&brute, 0);
    struct hapt_plan *plan = NULL;
    const enum hapt_status status = hapt_plan_search(MPI_COMM_SELF, brute.profile, &brute.options, &arena, &plan);
    if (!brute.found) {
        CHECK_MESSAGE(status == HAPT_ERR_INFEASIBLE, "seed %llu: infeasible, but the search says %s",
                      (unsigned long long)start_seed, hapt_status_name(status));
        hapt_fail_reset();
    } else if (CHECK_MESSAGE(status == HAPT_OK, "seed %llu: the search fails: %s", (unsigned long long)start_seed,
                             hapt_fail_message())) {
        const bool same = same_plan(plan, &brute.best);
        if (!CHECK_MESSAGE(same, "seed %llu: another plan", (unsigned long long)start_seed))
            print_difference(plan, &brute.best);
        CHECK_NEAR(plan->latency_s, brute.best.latency_s, 1e-12 * brute.best.latency_s);
        CHECK_OK(hapt_plan_check(plan));
        CHECK(plan->search.candidates <= candidates);
        brute.plan = brute.best;
        for (int i = 0; same && i < plan->stage_count; i++)
            CHECK(plan->stage[i].warmup == launches(&brute, i, plan->t_max_s));
        CHECK(plan->simulated_s > 0 && plan->balance_eta > 0 && plan->balance_eta <= 1 + 1e-12);
        count_kind(plan, brute.profile);
        CHECK(plan->search.gap == 0);
        compare_gap(&brute, start_seed, &arena);
    }
    hapt_fail_reset();
    hapt_arena_release(&arena);
}

static void search_equals_brute_force(void)
{
    const char *wanted = getenv("HAPT_TEST_SEED");
    const int count = wanted ? 1 : test_long() ? 160000 : 1500; /* two thirds have 2 to 4 subclusters */
    for (int i = 0; i < count; i++) compare_once(wanted ? strtoull(wanted, NULL, 10) : (uint64_t)i + 1, SMALL);
    printf("%d profiles: %ld feasible, %ld limited by a link, %ld by memory, %ld with idle devices, %ld skip a "
           "subcluster, %ld use equal ones, %ld recompute or have weights on the host; %ld with a gap end before the "
           "optimum\n",
           count, feasible_cases, link_cases, memory_cases, idle_cases, skip_cases, twin_cases, kept_cases,
           loose_cases);
    if (wanted) return;
    CHECK(kept_cases > count / 200);
    CHECK(feasible_cases > count / 2);
    CHECK(loose_cases > 0 && twin_cases > 0);
    CHECK(link_cases > 0 && memory_cases > 0 && idle_cases > 0 && skip_cases > 0);
}

/* Fewer cases, but with longer pipelines and more values of t_max. */
static void longer_pipelines(void)
{
    const int count = test_long() ? 1000 : 30;
    for (int i = 0; i < count; i++) compare_once((uint64_t)i + 1, LONGER);
}

/* Mixed stages on two or three subclusters. */
static void mixed_stages(void)
{
    const char *wanted = getenv("HAPT_TEST_SEED");
    const int count = wanted ? 1 : test_long() ? 40000 : 350;
    mixed_cases = between_cases = several_cases = feasible_cases = 0;
    for (int i = 0; i < count; i++) compare_once(wanted ? strtoull(wanted, NULL, 10) : (uint64_t)i + 1, MIXED);
    printf("%d profiles with mixed stages: %ld feasible, %ld plans use some, %ld between stages of their subclusters, "
           "%ld several\n",
           count, feasible_cases, mixed_cases, between_cases, several_cases);
    if (wanted) return;
    CHECK(mixed_cases > count / 5 && between_cases > count / 100 && several_cases > 0);
}

/* The search orders up to twelve different subclusters. More are refused. */
static void many_subclusters(void)
{
    for (int C = 12; C <= 13; C++) {
        uint64_t seed = 3;
        struct hapt_arena arena;
        struct hapt_plan *plan = NULL;
        hapt_arena_init(&arena);
        const struct hapt_profile *profile = random_profile_of(&seed, C, 4, &arena);
        const struct hapt_search_options options = {.microbatches = 8, .schedule = HAPT_SCHEDULE_1F1B};
        if (C == 12)
            CHECK_OK(hapt_plan_search(MPI_COMM_SELF, profile, &options, &arena, &plan));
        else
            CHECK_FAILS(hapt_plan_search(MPI_COMM_SELF, profile, &options, &arena, &plan), HAPT_ERR_INPUT);
        hapt_fail_reset();
        hapt_arena_release(&arena);
    }
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    random_keeps = true;
    RUN(search_equals_brute_force);
    RUN(longer_pipelines);
    RUN(mixed_stages);
    RUN(many_subclusters);
    return test_finish();
}
