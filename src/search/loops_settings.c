/* The settings of a looped schedule that the options allow, and stages that --stages gives. */
#include "loops.h"
#include "search.h"

#include <math.h>
#include <stdio.h>

enum { MOST_BATCHES = 6, MOST_PREFETCH = 8 };

static int add_setting(struct loops_setting *setting, int count, struct loops_setting added)
{
    if (count < LOOPS_MOST_SETTINGS) setting[count++] = added;
    return count;
}

/* Group sizes of the looped kind: divisors of B that are at least the number of submeshes, the smallest ones and B. */
static int list_batches(const struct hapt_search_options *options, int submeshes, int batch[MOST_BATCHES])
{
    const int B = options->microbatches;
    int count = 0;
    if (options->schedule != HAPT_SCHEDULE_LOOPED || options->loops.loop_batch > 0) {
        batch[0] = options->loops.loop_batch;
        return 1;
    }
    for (int d = submeshes < B ? submeshes : B; d < B && count < MOST_BATCHES - 1; d++)
        if (B % d == 0) batch[count++] = d;
    batch[count++] = B;
    return count;
}

/* The settings of a number of loops. */
static int add_settings(const struct hapt_search_options *options, int submeshes, int loops,
                        struct loops_setting *setting, int count)
{
    int batch[MOST_BATCHES];
    const int batches = list_batches(options, submeshes, batch);
    const bool chosen = options->schedule == HAPT_SCHEDULE_LOOPED && options->loops.prefetch < 0;
    const int given = options->schedule == HAPT_SCHEDULE_LOOPED && !chosen ? options->loops.prefetch : 0;
    const int last = chosen ? (submeshes - 1 < MOST_PREFETCH ? submeshes - 1 : MOST_PREFETCH) : given;
    for (int k = 0; k < batches; k++) {
        const int of = hapt_schedule_loop_batch(options->schedule, options->microbatches, submeshes, batch[k]);
        if (options->microbatches % of != 0) continue;
        for (int b = chosen ? 0 : given; b <= last; b++)
            count = add_setting(setting, count, (struct loops_setting){loops, batch[k], b});
    }
    return count;
}

int loops_list_settings(const struct hapt_search_options *options, int submeshes, int least_loops, int most_loops,
                        struct loops_setting setting[LOOPS_MOST_SETTINGS])
{
    int count = 0;
    for (int loops = least_loops; loops <= most_loops; loops++)
        count = add_settings(options, submeshes, loops, setting, count);
    return count;
}

enum hapt_status loops_check_batch(const struct hapt_search_options *options, int batch)
{
    const int B = options->microbatches;
    char hint[96];
    if (B % batch == 0) return HAPT_OK;
    int nearest = 1;
    for (int d = 1; d <= B; d++)
        if (B % d == 0 && fabs((double)d - batch) < fabs((double)nearest - batch)) nearest = d;
    const int more = (B + batch / 2) / batch * batch;
    snprintf(hint, sizeof hint, "give --loop-batch %d, or --microbatches %d", nearest, more > 0 ? more : batch);
    return hapt_fail(HAPT_ERR_USAGE, hint, "%d microbatches cannot be divided into groups of %d", B, batch);
}

enum hapt_status search_check_loops(const struct hapt_search_options *options)
{
    const struct hapt_search_loops *loops = &options->loops;
    const int most = HAPT_PLAN_MOST_LOOPED_PASSES / (2 * (loops->loops > 1 ? loops->loops : 2)); /* two submeshes */
    char hint[96];
    HAPT_ASSERT(hapt_schedule_loops(options->schedule));
    if (options->microbatches > most) {
        snprintf(hint, sizeof hint, "use at most %d microbatches, with more rows each", most);
        return hapt_fail(HAPT_ERR_USAGE, hint, "%d microbatches are too many for a looped schedule",
                         options->microbatches);
    }
    return loops->loop_batch > 0 ? loops_check_batch(options, loops->loop_batch) : HAPT_OK;
}

/* ---- Given stages ---- */

/* True if the stage is a candidate as its layout says. */
static bool is_candidate(const struct hapt_profile *profile, const struct hapt_plan_stage *stage)
{
    const struct hapt_profile_cluster *cluster = &profile->cluster[stage->submesh->subcluster[0]];
    for (int s = 0; s < cluster->submesh_count; s++)
        if (hapt_plan_stage_runs(stage, &cluster->submesh[s]) &&
            isfinite(cluster->stage_time[hapt_profile_index(profile, s, stage->first_layer, stage->end_layer - 1)]))
            return true;
    return false;
}

/* The program of a row, whatever the stage keeps on its devices. */
static void give_program(const struct hapt_profile *profile, const struct hapt_submesh *row,
                         struct hapt_plan_stage *stage)
{
    hapt_plan_stage_run(profile, stage->submesh->subcluster[0], row, stage);
    stage->layout.recompute = stage->layout.weights_at = -1;
}

/* True if all stages on the devices of stage `first` are candidates with the program of a row. */
static bool all_may_run(const struct hapt_profile *profile, const struct hapt_plan *plan, int first,
                        const struct hapt_submesh *row)
{
    const struct hapt_plan_submesh *submesh = plan->stage[first].submesh;
    if (row->n != submesh->nodes || row->m != submesh->devices_per_node) return false;
    for (int i = first; i < plan->stage_count; i++) {
        struct hapt_plan_stage stage = plan->stage[i];
        if (stage.submesh != submesh) continue;
        give_program(profile, row, &stage);
        if (!is_candidate(profile, &stage)) return false;
    }
    return true;
}

/* Another program for the stages of a submesh if one of them lacks that of the first stage. is_given [stage]: --stages
 * gives its program. */
static enum hapt_status choose_others(const struct hapt_profile *profile, const bool *is_given, struct hapt_plan *plan)
{
    bool changed = false;
    for (int first = 0; first < plan->stage_count; first++) {
        const struct hapt_plan_submesh *submesh = plan->stage[first].submesh;
        const struct hapt_profile_cluster *cluster = &profile->cluster[submesh->subcluster[0]];
        bool skip = false, lacks = false;
        int row = 0;
        for (int i = 0; i < plan->stage_count; i++) {
            if (plan->stage[i].submesh != submesh) continue;
            skip = skip || i < first || is_given[i]; /* i < first: the submesh was handled */
            lacks = lacks || !is_candidate(profile, &plan->stage[i]);
        }
        if (skip || !lacks) continue;
        while (row < cluster->submesh_count && !all_may_run(profile, plan, first, &cluster->submesh[row])) row++;
        if (row == cluster->submesh_count) continue; /* pricing says what is missing */
        for (int i = first; i < plan->stage_count; i++)
            if (plan->stage[i].submesh == submesh) give_program(profile, &cluster->submesh[row], &plan->stage[i]);
        changed = true;
    }
    return changed ? hapt_plan_price_tables(profile, plan) : HAPT_OK;
}

/* Programs that --stages leaves open: the stages of a submesh take that of its first one, and keep as much on their
 * devices if they can. Weights of one submesh move in one way. */
static enum hapt_status choose_programs(const struct hapt_profile *profile, struct hapt_arena *scratch,
                                        struct hapt_plan *plan)
{
    bool *is_given;
    HAPT_NEW(is_given, scratch, plan->stage_count);
    for (int i = 0; i < plan->stage_count; i++) is_given[i] = plan->stage[i].layout.tensor_parallel > 0;
    HAPT_TRY(hapt_plan_price_tables(profile, plan));
    for (int i = plan->stage_count - 1; i >= 0; i--) {
        int first = 0;
        while (plan->stage[first].submesh != plan->stage[i].submesh) first++;
        const struct hapt_layout own = plan->stage[i].layout;
        plan->stage[i].layout = plan->stage[first].layout;
        if (is_candidate(profile, &plan->stage[i])) continue;
        plan->stage[i].layout.recompute = own.recompute;
        plan->stage[i].layout.weights_at = own.weights_at;
        if (hapt_weights_move(own.weights_at) && hapt_weights_move(plan->stage[first].layout.weights_at) &&
            hapt_weights_on_host(own.weights_at) != hapt_weights_on_host(plan->stage[first].layout.weights_at))
            plan->stage[i].layout.weights_at = HAPT_WEIGHTS_RESIDENT;
    }
    return choose_others(profile, is_given, plan);
}

static enum hapt_status price_setting(const struct hapt_profile *profile, const struct loops_setting *setting,
                                      struct hapt_plan *plan)
{
    plan->loop_batch = setting->loop_batch;
    plan->prefetch = setting->prefetch;
    plan->transfer_slots = 0;
    HAPT_TRY(hapt_plan_choose_transfer_slots(plan));
    return hapt_plan_price_launches(profile, plan);
}

enum hapt_status search_price_loops(const struct hapt_profile *profile, const struct hapt_search_options *options,
                                    struct hapt_plan *plan)
{
    const int loops = options->loops.loops > 0 ? options->loops.loops : 2;
    struct loops_setting setting[LOOPS_MOST_SETTINGS];
    HAPT_TRY(search_check_loops(options));
    if (hapt_plan_first_mixed(plan) >= 0)
        return hapt_fail(HAPT_ERR_INPUT, "choose a schedule that is not looped",
                         "stage %d is mixed and cannot be looped", hapt_plan_first_mixed(plan));
    if (plan->stage_count % loops != 0)
        return hapt_fail(HAPT_ERR_USAGE, "name each submesh once per loop, in the order of the layers",
                         "--stages names %d stages, which are no %d loops", plan->stage_count, loops);
    HAPT_TRY(hapt_plan_fold(plan, plan->stage_count / loops, options->loops.v));
    const int settings = loops_list_settings(options, plan->submesh_count, loops, loops, setting);
    if (settings == 0)
        return loops_check_batch(options, hapt_schedule_loop_batch(options->schedule, options->microbatches,
                                                                   plan->submesh_count, options->loops.loop_batch));
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    const enum hapt_status chosen = choose_programs(profile, &scratch, plan);
    hapt_arena_release(&scratch);
    HAPT_TRY(chosen);
    int best = 0;
    double least_s = INFINITY;
    for (int k = 0; k < settings; k++) {
        const enum hapt_status status = price_setting(profile, &setting[k], plan);
        if (status == HAPT_OK && plan->simulated_s < least_s) {
            least_s = plan->simulated_s;
            best = k;
        }
        if (status == HAPT_ERR_INFEASIBLE || status == HAPT_ERR_USAGE)
            hapt_fail_reset();
        else
            HAPT_TRY(status);
    }
    return price_setting(profile, &setting[best], plan);
}
