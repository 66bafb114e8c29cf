/*
 * Profiles whose activations take fewer bytes. The rules of the formula ask for a number of microbatches in flight, and
 * stages that cannot hold them are no candidates. The shortest step often has fewer in flight if memory is tight.
 * Such stages are found in a relaxed profile and priced in the true one.
 */
#include "step.h"

#include <string.h>

/* The shares of the bytes that remain. */
static const double share[STEP_RELAXATIONS] = {0.75, 0.5, 0.25};

static enum hapt_status scale(const double *from, size_t cells, double factor, struct hapt_arena *arena, double **to)
{
    double *made;
    HAPT_NEW(made, arena, cells);
    for (size_t k = 0; k < cells; k++) made[k] = factor * from[k];
    *to = made;
    return HAPT_OK;
}

static enum hapt_status create(struct step_search *search, double factor, struct hapt_profile *view)
{
    const int C = search->C, mixed = search->useful.mixed_count;
    *view = search->useful;
    HAPT_NEW(view->cluster, &search->arena, C);
    HAPT_NEW(view->mixed, &search->arena, mixed);
    memcpy(view->cluster, search->useful.cluster, (size_t)C * sizeof *view->cluster);
    if (mixed > 0) memcpy(view->mixed, search->useful.mixed, (size_t)mixed * sizeof *view->mixed);
    for (int c = 0; c < C; c++) {
        struct hapt_profile_cluster *cluster = &view->cluster[c];
        const size_t cells = hapt_profile_index(view, cluster->submesh_count, 0, 0);
        HAPT_TRY(scale(cluster->activation_bytes, cells, factor, &search->arena, &cluster->activation_bytes));
    }
    for (int k = 0; k < mixed; k++) {
        struct hapt_profile_mixed *group = &view->mixed[k];
        const size_t cells = hapt_profile_index(view, group->memory_rows, 0, 0);
        HAPT_TRY(scale(group->activation_bytes, cells, factor, &search->arena, &group->activation_bytes));
    }
    return HAPT_OK;
}

enum hapt_status step_relaxed(struct step_search *search, int level, const struct hapt_profile **view)
{
    struct hapt_profile *relaxed = &search->relaxed[level];
    if (!search->is_relaxed[level]) HAPT_TRY(create(search, share[level], relaxed));
    search->is_relaxed[level] = true;
    *view = relaxed;
    return HAPT_OK;
}
