/*
 * Searches plans of large transformers on mixed clusters. Profiles come from closed formulas.
 *
 * mpirun -np RANKS search_instances gpt39b|gpt39b-unique|gpt39b-mixed|lab12|site1024|site1024-all [GAP [REPEATS
 * [simulated]]]
 *
 * Prints a JSON object: seconds by phase, values of t_max, states, gap and the largest resident set of a rank. A block
 * has three layers: attention, the widening product and the narrowing product. The boundaries inside a block carry 4
 * and 5 times the hidden size. Device and link figures are spec sheets at 40 % of the peak.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "hapt/search.h"
#include "hapt/plan.h"

struct device {
    const char *name;
    int nodes;                                   /* of 8 devices */
    double flops, memory_bytes;                  /* sustained on matrix products; of one device */
    double node_bytes_per_s, fabric_bytes_per_s; /* all-reduce inside a node, and per device between nodes */
};

struct instance {
    const char *name;
    int blocks, layers, hidden, microbatches;
    int cluster_count;
    struct device device[4];       /* subcluster c is of kind c % 4 */
    double link_bytes_per_s[4][4]; /* between kinds */
    bool every_node_count;         /* true: (n, 8) for all n; false: those that divide the rows of a microbatch */
    double noise;                  /* every cost is scaled by its own random factor in [1, 1 + noise] */
    int mixed; /* mixed stages on the first two subclusters: k devices of each, for all k up to this */
};

enum { KINDS = 4, NODE = 8, ROWS = 8, SEQUENCE = 1024, VOCABULARY = 50304 };

#define GIB (1024.0 * 1024 * 1024)
#define GBIT (1e9 / 8)
/* clang-format off: tables */
#define A100_40                                                     \
    {                                                               \
        "a100-40", 4, 0.4 * 312e12, 40 * GIB, 300e9, 200 * GBIT / 8 \
    }
#define V100_32                                                     \
    {                                                               \
        "v100-32", 4, 0.4 * 125e12, 32 * GIB, 150e9, 200 * GBIT / 8 \
    }
#define SITE                                                                \
    {                                                                       \
        {"h100-80", 32, 0.4 * 989e12, 80 * GIB, 450e9, 400 * GBIT / 8},     \
            {"a100-40", 32, 0.4 * 312e12, 40 * GIB, 300e9, 200 * GBIT / 8}, \
            {"a100-80", 32, 0.4 * 312e12, 80 * GIB, 300e9, 200 * GBIT / 8}, \
        {                                                                   \
            "v100-32", 32, 0.4 * 125e12, 32 * GIB, 150e9, 100 * GBIT / 8    \
        }                                                                   \
    }
#define LAB                                                                \
    {                                                                      \
        {"h100-80", 1, 0.4 * 989e12, 80 * GIB, 450e9, 400 * GBIT / 8},     \
            {"a100-40", 2, 0.4 * 312e12, 40 * GIB, 300e9, 200 * GBIT / 8}, \
            {"a100-80", 1, 0.4 * 312e12, 80 * GIB, 300e9, 200 * GBIT / 8}, \
        {                                                                  \
            "v100-32", 2, 0.4 * 125e12, 32 * GIB, 150e9, 100 * GBIT / 8    \
        }                                                                  \
    }
#define SITE_LINKS                                                                                   \
    {                                                                                                \
        {400 * GBIT, 25 * GBIT, 10 * GBIT, 5 * GBIT}, {25 * GBIT, 200 * GBIT, 25 * GBIT, 10 * GBIT}, \
            {10 * GBIT, 25 * GBIT, 200 * GBIT, 10 * GBIT},                                           \
        {                                                                                            \
            5 * GBIT, 10 * GBIT, 10 * GBIT, 100 * GBIT                                               \
        }                                                                                            \
    }
#define PAIR_LINKS               \
    {                            \
        {200 * GBIT, 5 * GBIT},  \
        {                        \
            5 * GBIT, 200 * GBIT \
        }                        \
    }
#define NEAR_LINKS                 \
    {                              \
        {200 * GBIT, 200 * GBIT},  \
        {                          \
            200 * GBIT, 200 * GBIT \
        }                          \
    }
/* clang-format on */

static const struct instance instances[] = {
    {"gpt39b", 48, 146, 8192, 128, 2, {A100_40, V100_32}, PAIR_LINKS, false, 0, 0},
    {"gpt39b-unique", 48, 146, 8192, 128, 2, {A100_40, V100_32}, PAIR_LINKS, false, 0.03, 0},
    {"gpt39b-mixed", 48, 146, 8192, 128, 2, {A100_40, V100_32}, NEAR_LINKS, false, 0.03, 16},
    {"lab12", 48, 146, 4096, 128, 12, LAB, SITE_LINKS, false, 0, 0},
    {"site1024", 333, 1000, 8192, 1024, 4, SITE, SITE_LINKS, false, 0.01, 0},
    {"site1024-all", 333, 1000, 8192, 1024, 4, SITE, SITE_LINKS, true, 0.01, 0},
};

/* Sums over layers for the cost of a range per microbatch, independent of the device. */
struct work {
    double *flops, *parameters, *activations,
        *reduces; /* [L + 1] FLOP, weights, bytes, all-reduces of tensor parallelism */
};

static enum hapt_status sum_layers(const struct instance *instance, struct hapt_arena *arena, struct work *work,
                                   double *boundary_bytes)
{
    const double d = instance->hidden, tokens = (double)ROWS * SEQUENCE;
    double **const table[] = {&work->flops, &work->parameters, &work->activations, &work->reduces};
    for (int k = 0; k < 4; k++) HAPT_NEW(*table[k], arena, instance->layers + 1);
    for (int l = 0; l < instance->layers; l++) {
        const int part = l - 1; /* behind the embedding */
        const bool embedding = l == 0, head = part >= 3 * instance->blocks;
        double weights = VOCABULARY * d, bytes = tokens * d * 4, extra = 0, wide = 1;
        if (!embedding && !head) {
            static const double share[3] = {4, 4, 4}, width[3] = {4, 5, 1}, kept[3] = {16, 10, 8};
            weights = share[part % 3] * d * d;
            bytes = kept[part % 3] * tokens * d;
            extra = part % 3 == 0 ? 12 * tokens * SEQUENCE * d : 0;
            wide = width[part % 3];
        }
        work->flops[l + 1] = work->flops[l] + (embedding ? 0 : 6 * tokens * weights + extra);
        work->parameters[l + 1] = work->parameters[l] + weights;
        work->activations[l + 1] = work->activations[l] + bytes;
        work->reduces[l + 1] = work->reduces[l] + (embedding || part % 3 == 1 ? 0 : 2);
        boundary_bytes[l] = l == instance->layers - 1 ? 0 : wide * tokens * d * 2;
    }
    return HAPT_OK;
}

/* The rows limit the data-parallel degree; a node limits the tensor-parallel degree. */
static int list_submeshes(const struct instance *instance, int nodes, struct hapt_submesh *submesh)
{
    int count = 0;
    for (int devices = 1; devices <= nodes * NODE; devices += devices < NODE ? devices : NODE) {
        const int n = devices < NODE ? 1 : devices / NODE, m = devices < NODE ? devices : NODE;
        if (!instance->every_node_count && (n & (n - 1)) != 0) continue;
        for (int tp = 1; tp <= m; tp *= 2) {
            const int dp = devices / tp;
            /* if every number of nodes is offered, sequences are sharded as well, and several nodes run tp 8 only */
            if (instance->every_node_count ? n > 1 && tp < NODE : ROWS % dp != 0) continue;
            submesh[count++] = (struct hapt_submesh){n, m, tp, 0, 0, 0};
        }
    }
    return count;
}

static void fill_cell(const struct instance *instance, const struct work *work, const struct device *device,
                      struct hapt_submesh submesh, double factor, int first, int last,
                      struct hapt_profile_cluster *table, size_t cell)
{
    const int devices = submesh.n * submesh.m, tp = submesh.tp, dp = devices / tp;
    const double rows = (double)ROWS / dp; /* of the mixed stage */
    const double weights = (work->parameters[last + 1] - work->parameters[first]) / tp;
    const double kept = (work->activations[last + 1] - work->activations[first]) * rows / ROWS / tp;
    const double reduced = (work->reduces[last + 1] - work->reduces[first]) * rows * SEQUENCE * instance->hidden * 2;
    const double compute_s = (work->flops[last + 1] - work->flops[first]) * rows / ROWS / tp / device->flops;
    const double reduce_s = tp > 1 ? 2 * reduced * (tp - 1) / tp / device->node_bytes_per_s : 0;
    const double fabric = submesh.n > 1 ? device->fabric_bytes_per_s : device->node_bytes_per_s;
    table->parameter_bytes[cell] = 16 * weights + 1 * GIB;
    table->activation_bytes[cell] = kept;
    table->stage_time[cell] = (compute_s + reduce_s + 50e-6 * (last + 1 - first)) * factor;
    table->stage_forward_time[cell] = table->stage_time[cell] / 3;
    table->step_time[cell] = (dp > 1 ? 2.0 * (dp - 1) / dp * 4 * weights / fabric : 0) + 20 * weights / 1e12;
}

static void fill_cluster(const struct instance *instance, const struct work *work, int c, uint64_t *seed,
                         struct hapt_profile *profile)
{
    struct hapt_profile_cluster *table = &profile->cluster[c];
    const struct device *device = &instance->device[c % KINDS];
    double speed = 0;
    for (int k = 0; k < instance->cluster_count; k++)
        speed += instance->device[k % KINDS].flops * instance->device[k % KINDS].nodes * NODE;
    for (int s = 0; s < table->submesh_count; s++) {
        const double share = device->flops * table->submesh[s].n * table->submesh[s].m / speed;
        for (int i = 0; i < profile->layer_count; i++) {
            for (int j = i; j < profile->layer_count; j++) {
                const size_t cell = hapt_profile_index(profile, s, i, j);
                const double factor = instance->noise > 0 ? 1 + instance->noise * hapt_random_unit(seed) : 1;
                /* pruned like a measured profile: too little memory, or out of balance by more than a factor of 4 */
                if (j > i && work->flops[j + 1] - work->flops[i] > 4 * share * work->flops[profile->layer_count]) break;
                fill_cell(instance, work, device, table->submesh[s], factor, i, j, table, cell);
                if (table->parameter_bytes[cell] + table->activation_bytes[cell] > device->memory_bytes)
                    table->stage_time[cell] = table->stage_forward_time[cell] = NAN;
            }
        }
    }
}

/* Work in proportion to speed, weights and activations per device: as if every operator were divided. */
static enum hapt_status add_mixed(const struct instance *instance, const struct work *work, int devices, uint64_t *seed,
                                  struct hapt_arena *arena, struct hapt_profile *profile)
{
    const int cluster[2] = {0, 1}, count[2] = {devices, devices};
    const double speed = devices * (instance->device[0].flops + instance->device[1].flops);
    struct hapt_profile_mixed *mixed;
    HAPT_TRY(hapt_profile_add_mixed(profile, 2, cluster, count, arena, &mixed));
    for (int i = 0; i < profile->layer_count; i++) {
        for (int j = i; j < profile->layer_count; j++) {
            const size_t cell = hapt_profile_index(profile, 0, i, j), other = hapt_profile_index(profile, 1, i, j);
            const double weights = (work->parameters[j + 1] - work->parameters[i]) / (2 * devices);
            mixed->parameter_bytes[cell] = mixed->parameter_bytes[other] = 16 * weights + 1 * GIB;
            mixed->activation_bytes[cell] = mixed->activation_bytes[other] =
                (work->activations[j + 1] - work->activations[i]) / (2 * devices);
            if (mixed->parameter_bytes[cell] > instance->device[1].memory_bytes) continue;
            mixed->stage_time[cell] = (1 + instance->noise * hapt_random_unit(seed)) *
                                      ((work->flops[j + 1] - work->flops[i]) / speed + 50e-6 * (j + 1 - i));
            mixed->stage_forward_time[cell] = mixed->stage_time[cell] / 3;
        }
    }
    return HAPT_OK;
}

static enum hapt_status build(const struct instance *instance, struct hapt_arena *arena, struct hapt_profile **profile)
{
    struct hapt_submesh submesh[256];
    char name[64];
    struct work work;
    uint64_t seed = 1;
    const int C = instance->cluster_count;
    HAPT_TRY(hapt_profile_create(instance->layers, C, arena, profile));
    HAPT_TRY(sum_layers(instance, arena, &work, (*profile)->boundary_bytes));
    for (int c = 0; c < C; c++) {
        const struct device *device = &instance->device[c % KINDS];
        const int count = list_submeshes(instance, device->nodes, submesh);
        snprintf(name, sizeof name, c < KINDS ? "%s" : "%s-%d", device->name, c / KINDS);
        HAPT_TRY(hapt_profile_add_cluster(*profile, c, name, device->nodes, NODE, device->memory_bytes, device->flops,
                                          submesh, count, arena));
        fill_cluster(instance, &work, c, &seed, *profile);
        for (int other = 0; other < C; other++) {
            (*profile)->link_bandwidth[c * C + other] = instance->link_bytes_per_s[c % KINDS][other % KINDS];
            (*profile)->link_latency[c * C + other] = 20e-6;
        }
    }
    for (int k = 1; k <= instance->mixed; k++) HAPT_TRY(add_mixed(instance, &work, k, &seed, arena, *profile));
    (*profile)->flops = work.flops[instance->layers];
    return hapt_profile_check(*profile);
}

/* Memory of this process only. Shared tables count once per node, not here. */
static double private_bytes(void)
{
    double peak = 0, value;
    char line[256];
    FILE *file = fopen("/proc/self/status", "r");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "RssAnon: %lf", &value) == 1) peak = value * 1024;
    if (file) fclose(file);
    return peak;
}

static enum hapt_status run(const struct hapt_env *env, const struct instance *instance, double gap, int repeats,
                            enum hapt_objective objective, struct hapt_arena *arena)
{
    struct hapt_arena mine;
    struct hapt_profile *made = NULL, *profile;
    hapt_arena_init(&mine);
    enum hapt_status status = HAPT_OK;
    if (env->node_rank == 0) status = build(instance, env->node_size > 1 ? &mine : arena, &made);
    status = hapt_profile_share(env, status, made, arena, &profile);
    hapt_arena_release(&mine);
    HAPT_TRY(status);
    const double before = private_bytes();
    struct hapt_plan *plan = NULL;
    double best_s = INFINITY;
    struct hapt_search_effort effort = {0}, best = {0};
    for (int i = 0; i < repeats; i++) {
        const struct hapt_search_options options = {.objective = objective,
                                                    .any_schedule = true, /* the simulated objective alone reads both */
                                                    .any_threshold = true,
                                                    .microbatches = instance->microbatches,
                                                    .schedule = HAPT_SCHEDULE_H1F1B,
                                                    .hide_threshold = 0.02,
                                                    .gap = gap,
                                                    .effort = &effort};
        HAPT_TRY(hapt_plan_search(env->world, profile, &options, arena, &plan));
        if (plan->search.seconds >= best_s) continue;
        best_s = plan->search.seconds;
        best = effort;
    }
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    double peak = (double)usage.ru_maxrss * 1024;
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, &peak, 1, MPI_DOUBLE, MPI_MAX, env->world));
    if (env->world_rank != 0) return HAPT_OK;
    printf(
        "{\"instance\":\"%s\",\"simulated_s\":%.17g,\"bound_s\":%.17g,\"ranks\":%d,\"layers\":%d,\"microbatches\":%d,"
        "\"seconds\":%.4f,\"gap\":%.3g,"
        "\"latency_s\":%.17g,\"t_max_s\":%.17g,\"stages\":%d,\"paces\":%lld,\"priced\":%lld,\"peak_rss_bytes\":%.0f,"
        "\"private_bytes\":%.0f,\"index_s\":%.4f,\"start_s\":%.4f,\"narrow_s\":%.4f,\"relax_s\":%.4f,\"exact_s\":%.4f,"
        "\"wait_s\":%.4f,\"trace_s\":%.4f,\"candidates\":%lld,\"cells\":%lld,\"points\":%lld}\n",
        instance->name, plan->simulated_s, plan->bound_s, env->world_size, instance->layers, instance->microbatches,
        best_s, plan->search.gap, plan->latency_s, plan->t_max_s, plan->stage_count, (long long)plan->search.candidates,
        (long long)plan->search.evaluated, peak, private_bytes() - before, best.index_s, best.start_s, best.narrow_s,
        best.relax_s, best.exact_s, best.wait_s, best.trace_s, (long long)best.candidates, (long long)best.cells,
        (long long)best.points);
    return HAPT_OK;
}

int main(int argc, char **argv)
{
    struct hapt_env env;
    struct hapt_arena arena;
    const struct instance *chosen = NULL;
    if (hapt_env_init(&env, &argc, &argv, HAPT_ENV_TIMEOUT_S) != HAPT_OK) return 1;
    for (size_t k = 0; k < sizeof instances / sizeof *instances; k++)
        if (argc > 1 && strcmp(argv[1], instances[k].name) == 0) chosen = &instances[k];
    const double gap = argc > 2 ? atof(argv[2]) : 0;
    const int repeats = argc > 3 ? atoi(argv[3]) : 1;
    hapt_arena_init(&arena);
    enum hapt_status status = HAPT_ERR_USAGE;
    if (chosen && repeats > 0)
        status =
            run(&env, chosen, gap, repeats,
                argc > 4 && strcmp(argv[4], "simulated") == 0 ? HAPT_OBJECTIVE_STEP : HAPT_OBJECTIVE_FORMULA, &arena);
    else if (env.world_rank == 0)
        fprintf(stderr,
                "usage: search_instances gpt39b|gpt39b-unique|gpt39b-mixed|lab12|site1024|site1024-all [GAP [REPEATS "
                "[simulated]]]\n");
    hapt_arena_release(&arena);
    hapt_env_release(&env);
    return (int)status;
}
