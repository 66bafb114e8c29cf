/* Compares the plan on all subclusters with plans on each subcluster alone. */
#include "view.h"

#include "hapt/rivals.h"

static enum hapt_status judge(const struct hapt_env *env, const struct hapt_profile *profile,
                              const struct hapt_search_options *options, struct hapt_arena *arena,
                              struct hapt_join_benefit *benefit)
{
    struct hapt_search_options alone = *options;
    alone.use_all_devices &= profile->cluster_count == 1;
    for (int c = 0; c < benefit->subclusters; c++) {
        const struct view_limits limits = {.left_out = ~(1u << c)};
        HAPT_TRY(view_search(env, profile, &limits, &alone, arena, &benefit->alone[c]));
        benefit->obstacle[c] = hapt_arena_strdup(arena, benefit->alone[c] ? "" : hapt_fail_message());
        HAPT_TRY(hapt_env_agree(env->world, benefit->obstacle[c] ? HAPT_OK : HAPT_ERR_MEMORY));
        hapt_fail_reset();
        if (!benefit->alone[c]) continue;
        const double alone_per_s = hapt_plan_rate(benefit->alone[c]);
        benefit->apart_per_s += alone_per_s;
        benefit->copies++;
        if (benefit->best >= 0 && alone_per_s <= benefit->alone_per_s) continue;
        benefit->best = c;
        benefit->alone_per_s = alone_per_s;
    }
    return HAPT_OK;
}

enum hapt_status hapt_plan_join_benefit(const struct hapt_env *env, const struct hapt_profile *profile,
                                        const struct hapt_search_options *options, const struct hapt_plan *plan,
                                        struct hapt_arena *arena, struct hapt_join_benefit **benefit)
{
    const int C = profile->cluster_count;
    struct hapt_join_benefit *made = hapt_arena_alloc(arena, 1, sizeof *made);
    if (made) {
        *made = (struct hapt_join_benefit){.subclusters = C, .best = -1, .together_per_s = hapt_plan_rate(plan)};
        made->alone = hapt_arena_alloc(arena, (size_t)C, sizeof *made->alone);
        made->obstacle = hapt_arena_alloc(arena, (size_t)C, sizeof *made->obstacle);
    }
    const bool room = made && made->alone && made->obstacle;
    HAPT_TRY(hapt_env_agree(env->world, room ? HAPT_OK : HAPT_ERR_MEMORY));
    HAPT_TRY(judge(env, profile, options, arena, made));
    *benefit = made;
    return HAPT_OK;
}
