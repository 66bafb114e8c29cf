/* Exchange between ranks that share the work: the best candidates, and results of searches. */
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

enum hapt_status step_send(const struct step_search *search, int from, struct step_candidate *candidate)
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
    if (candidate->count == 0) return HAPT_OK;
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
    return step_send(search, (int)(first % search->size), best);
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
        bool known = false; /* of two ranks */
        for (int before = 0; found && before < k; before++)
            known = known || step_same_stages(&all->candidate[before], best);
        if (known) best->step_s = INFINITY;
        k += !known;
    }
    return HAPT_OK;
}

struct step_ranks step_leave(struct step_search *search)
{
    const struct step_ranks ranks = {search->comm, search->rank, search->size};
    search->comm = MPI_COMM_SELF;
    search->rank = 0;
    search->size = 1;
    return ranks;
}

void step_rejoin(struct step_search *search, struct step_ranks ranks)
{
    search->comm = ranks.comm;
    search->rank = ranks.rank;
    search->size = ranks.size;
}

enum hapt_status step_share(struct step_search *search, int from)
{
    double figure[2] = {search->bound_s, search->work};
    int64_t count[4] = {search->seed_count, search->enumerated, search->figures.candidates, search->figures.evaluated};
    HAPT_MPI(MPI_Bcast(figure, 2, MPI_DOUBLE, from, search->comm));
    HAPT_MPI(MPI_Bcast(count, 4, MPI_INT64_T, from, search->comm));
    search->bound_s = figure[0];
    search->work = figure[1];
    search->seed_count = (int)count[0];
    search->enumerated = count[1];
    search->figures.candidates = count[2];
    search->figures.evaluated = count[3];
    HAPT_TRY(step_send(search, from, &search->best));
    for (int k = 0; k < search->seed_count; k++) HAPT_TRY(step_send(search, from, &search->seed[k]));
    return HAPT_OK;
}
