/* The best candidates: of one rank, and of all ranks that share the work. */
#include "step.h"

#include <math.h>

void step_keep(struct step_kept *kept, const struct step_candidate *candidate, int64_t number)
{
    int at = kept->size;
    if (!isfinite(candidate->step_s)) return;
    for (int k = 0; k < kept->size; k++)
        if (isfinite(kept->candidate[k].step_s) && step_same_stages(&kept->candidate[k], candidate)) return;
    while (at > 0 && candidate->step_s < kept->candidate[at - 1].step_s) at--;
    if (at == kept->size) return;
    const struct step_candidate room = kept->candidate[kept->size - 1];
    for (int k = kept->size - 1; k > at; k--) {
        kept->candidate[k] = kept->candidate[k - 1];
        kept->number[k] = kept->number[k - 1];
    }
    kept->candidate[at] = room;
    kept->number[at] = number;
    step_candidate_copy(&kept->candidate[at], candidate);
}

enum hapt_status step_kept_create(struct step_search *search, int size, struct step_kept *kept)
{
    HAPT_ASSERT(size <= STEP_MOST_KEPT);
    kept->size = size;
    for (int k = 0; k < size; k++) HAPT_TRY(step_candidate_create(search, &kept->candidate[k]));
    return HAPT_OK;
}

void step_kept_clear(struct step_kept *kept)
{
    for (int k = 0; k < kept->size; k++) kept->candidate[k].step_s = INFINITY;
}

/* Sends a candidate of rank `from` to all ranks. */
static enum hapt_status send(const struct step_search *search, int from, struct step_candidate *candidate)
{
    double figure[3] = {candidate->hide_threshold, candidate->step_s, candidate->lower_s};
    int number[2] = {candidate->count, candidate->schedule};
    HAPT_MPI(MPI_Bcast(figure, 3, MPI_DOUBLE, from, search->comm));
    HAPT_MPI(MPI_Bcast(number, 2, MPI_INT, from, search->comm));
    candidate->hide_threshold = figure[0];
    candidate->step_s = figure[1];
    candidate->lower_s = figure[2];
    candidate->count = number[0];
    candidate->schedule = (enum hapt_schedule_kind)number[1];
    HAPT_MPI(MPI_Bcast(candidate->launches, candidate->count, MPI_INT, from, search->comm));
    return hapt_env_mpi(
        MPI_Bcast(candidate->stage, candidate->count * (int)sizeof *candidate->stage, MPI_BYTE, from, search->comm),
        "MPI_Bcast");
}

/* The best of what the ranks have left becomes *best; its rank goes on to the next of its own. *found false: no rank
 * has any. */
static enum hapt_status gather_next(const struct step_search *search, const struct step_kept *kept, int *next,
                                    struct step_candidate *best, bool *found)
{
    const double mine_s = *next < kept->size ? kept->candidate[*next].step_s : INFINITY;
    double least_s;
    int64_t first;
    HAPT_MPI(MPI_Allreduce(&mine_s, &least_s, 1, MPI_DOUBLE, MPI_MIN, search->comm));
    *found = isfinite(least_s);
    if (!*found) return HAPT_OK;
    const int64_t mine = mine_s <= least_s ? kept->number[*next] * search->size + search->rank : INT64_MAX;
    HAPT_MPI(MPI_Allreduce(&mine, &first, 1, MPI_INT64_T, MPI_MIN, search->comm));
    if (mine == first) step_candidate_copy(best, &kept->candidate[(*next)++]);
    return send(search, (int)(first % search->size), best);
}

enum hapt_status step_gather(const struct step_search *search, const struct step_kept *kept, struct step_kept *all)
{
    int next = 0; /* of this rank's candidates */
    bool found = true;
    step_kept_clear(all);
    if (search->size == 1)
        for (int k = 0; k < kept->size && isfinite(kept->candidate[k].step_s); k++)
            step_candidate_copy(&all->candidate[k], &kept->candidate[k]);
    for (int k = 0; k < all->size && found && search->size > 1;) {
        struct step_candidate *best = &all->candidate[k];
        HAPT_TRY(gather_next(search, kept, &next, best, &found));
        const bool known = found && k > 0 && step_same_stages(&best[-1], best); /* of two ranks */
        if (known) best->step_s = INFINITY;
        k += !known;
    }
    return HAPT_OK;
}
