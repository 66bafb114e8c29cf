/* The search of the objective, schedule and backward passes that the options ask for. */
#include "search.h"

#include <math.h>

/* A looped plan has to be shorter by this factor. */
#define LOOPS_WORTH 0.98

static enum hapt_status search(MPI_Comm comm, const struct hapt_profile *profile,
                               const struct hapt_search_options *options, struct hapt_arena *result,
                               struct hapt_plan **plan)
{
    return hapt_schedule_loops(options->schedule) ? hapt_plan_search_loops(comm, profile, options, result, plan)
                                                  : hapt_plan_search_formula(comm, profile, options, result, plan);
}

/* Searches with the memory of split programs, then splits. */
static enum hapt_status search_split(MPI_Comm comm, const struct hapt_profile *profile,
                                     const struct hapt_search_options *options, struct hapt_arena *result,
                                     struct hapt_plan **plan)
{
    struct hapt_arena scratch;
    const struct hapt_profile *view;
    bool fits;
    hapt_arena_init(&scratch);
    enum hapt_status status = hapt_env_agree(comm, hapt_plan_split_view(profile, &scratch, &view));
    if (status == HAPT_OK) status = search(comm, view, options, result, plan);
    if (status == HAPT_OK) status = hapt_plan_choose_split(comm, profile, options, result, plan, &fits);
    hapt_arena_release(&scratch);
    return status;
}

enum hapt_status hapt_plan_search(MPI_Comm comm, const struct hapt_profile *profile,
                                  const struct hapt_search_options *options, struct hapt_arena *result,
                                  struct hapt_plan **plan)
{
    struct hapt_plan *split = NULL;
    bool fits;
    if (options->objective == HAPT_OBJECTIVE_STEP && !hapt_schedule_loops(options->schedule)) {
        const struct hapt_search_batching only = {options->microbatches, profile, false};
        int chosen;
        return hapt_plan_search_batchings(comm, &only, 1, options, result, plan, &chosen);
    }
    if (options->split == HAPT_SPLIT_YES) return search_split(comm, profile, options, result, plan);
    HAPT_TRY(search(comm, profile, options, result, plan));
    HAPT_TRY(hapt_plan_choose_split(comm, profile, options, result, plan, &fits));
    if (fits) return HAPT_OK;
    const struct hapt_search_options again = search_split_again(options);
    const enum hapt_status status = search_split(comm, profile, &again, result, &split);
    return search_take_split(profile, status, split, plan);
}

/* The best looped plan of all batchings becomes *plan, if it is worth it. each [count]: plans without loops. */
static enum hapt_status choose_loops(MPI_Comm comm, const struct hapt_search_batching *batching, int count,
                                     const struct hapt_search_options *options, struct hapt_plan *const *each,
                                     struct hapt_arena *result, struct hapt_plan **plan, int *chosen)
{
    const struct hapt_plan *unlooped = *plan;
    for (int k = 0; k < count; k++) {
        struct hapt_search_options own = *options;
        struct hapt_plan *const before = *plan;
        const double limit_s = before == unlooped ? LOOPS_WORTH * unlooped->simulated_s : before->simulated_s;
        own.microbatches = batching[k].microbatches;
        if (!each[k] || !search_may_loop(batching[k].profile, &own)) continue;
        HAPT_TRY(search_choose_loops(comm, batching[k].profile, &own, each[k], limit_s, result, plan));
        if (*plan == before) continue;
        (*plan)->search = unlooped->search;
        *chosen = k;
    }
    return HAPT_OK;
}

static enum hapt_status search_each(MPI_Comm comm, const struct hapt_search_batching *batching, int count,
                                    const struct hapt_search_options *options, struct hapt_arena *result,
                                    struct hapt_plan **plan, int *chosen)
{
    struct hapt_plan **each;
    if (!options->any_loops) return search_batchings(comm, batching, count, options, result, plan, chosen, NULL);
    each = hapt_arena_alloc(result, (size_t)count, sizeof *each);
    HAPT_TRY(hapt_env_agree(comm, each ? HAPT_OK : HAPT_ERR_MEMORY));
    HAPT_TRY(search_batchings(comm, batching, count, options, result, plan, chosen, each));
    return choose_loops(comm, batching, count, options, each, result, plan, chosen);
}

/* ---- What stages keep ---- */

/* True if stages may keep all on their devices, or not. */
static bool may_choose(const struct hapt_profile *profile)
{
    bool keeps = false, chooses = false;
    for (int c = 0; c < profile->cluster_count; c++)
        for (int s = 0; s < profile->cluster[c].submesh_count; s++) {
            const struct hapt_submesh *submesh = &profile->cluster[c].submesh[s];
            const bool all = submesh->recompute == 0 && !hapt_weights_move(submesh->weights_at);
            keeps = keeps || all;
            chooses = chooses || !all;
        }
    return keeps && chooses;
}

/* The answer with fewer choices is a candidate, so that the other one is never slower. Without a plan, *plan is NULL.
 */
static enum hapt_status search_kept(MPI_Comm comm, const struct hapt_search_batching *batching, int count,
                                    const struct hapt_search_options *options, struct hapt_arena *result,
                                    struct hapt_plan **plan, int *chosen)
{
    struct hapt_search_options own = *options;
    struct hapt_search_batching *view;
    struct hapt_arena scratch;
    int *batching_of, views = 0; /* [views] */
    own.may_fail = true;
    *plan = NULL;
    hapt_arena_init(&scratch);
    view = hapt_arena_alloc(&scratch, (size_t)count, sizeof *view);
    batching_of = hapt_arena_alloc(&scratch, (size_t)count, sizeof *batching_of);
    enum hapt_status status = view && batching_of ? HAPT_OK : HAPT_ERR_MEMORY;
    for (int k = 0; k < count && status == HAPT_OK; k++) {
        struct hapt_profile *kept = NULL;
        if (batching[k].kept_is_known) continue;
        status = hapt_profile_kept_view(batching[k].profile, &scratch, &kept);
        view[views] = (struct hapt_search_batching){batching[k].microbatches, kept, false};
        batching_of[views++] = k;
    }
    status = hapt_env_agree(comm, status);
    if (status == HAPT_OK && views > 0) status = search_each(comm, view, views, &own, result, plan, chosen);
    if (status == HAPT_OK && views > 0) *chosen = batching_of[*chosen];
    hapt_arena_release(&scratch);
    if (status != HAPT_ERR_INFEASIBLE) return status;
    hapt_fail_reset();
    return HAPT_OK;
}

enum hapt_status hapt_plan_search_batchings(MPI_Comm comm, const struct hapt_search_batching *batching, int count,
                                            const struct hapt_search_options *options, struct hapt_arena *result,
                                            struct hapt_plan **plan, int *chosen)
{
    struct hapt_search_options own = *options;
    struct hapt_plan *kept = NULL;
    int chosen_kept = -1;
    bool some = false;
    for (int k = 0; k < count; k++) some = some || may_choose(batching[k].profile);
    if (some) HAPT_TRY(search_kept(comm, batching, count, options, result, &kept, &chosen_kept));
    if (kept) own.known_s = own.known_s > 0 ? fmin(own.known_s, kept->simulated_s) : kept->simulated_s;
    HAPT_TRY(search_each(comm, batching, count, &own, result, plan, chosen));
    if (!kept || (*plan)->simulated_s <= kept->simulated_s) return HAPT_OK;
    kept->bound_s = hapt_schedule_loops(kept->schedule) || hapt_schedule_loops((*plan)->schedule)
                        ? 0
                        : fmin(kept->bound_s, (*plan)->bound_s);
    *plan = kept;
    *chosen = chosen_kept;
    return HAPT_OK;
}
