/* Agreements with a deadline between the ranks of any communicator: during training a peer may have died. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "collective.h"
#include "hapt/stop.h"

#define NAMED 4         /* limit of absent ranks that a message names */
#define WAIT_SHARE 0.25 /* share of the time-out */
#define MAX_WAIT_S 5.0

void hapt_link_wait_for_job_end(double timeout_s)
{
    const double until_s = hapt_time_s() + fmin(WAIT_SHARE * timeout_s, MAX_WAIT_S);
    while (hapt_time_s() < until_s && !hapt_stop_terminated()) hapt_time_sleep_until(hapt_time_s() + 10e-3);
}

enum hapt_status link_wait(int count, MPI_Request *request, double deadline_s, bool *late)
{
    unsigned spins = 0;
    for (;;) {
        int done = 0;
        HAPT_MPI(MPI_Testall(count, request, &done, MPI_STATUSES_IGNORE));
        *late = !done && hapt_time_s() > deadline_s;
        if (done || *late) return HAPT_OK;
        hapt_link_pause(&spins);
    }
}

/* Rank of MPI_COMM_WORLD; `rank` itself if the library cannot translate it. */
static int in_world(MPI_Comm comm, int rank)
{
    MPI_Group group, world;
    int found = rank;
    if (MPI_Comm_group(comm, &group) != MPI_SUCCESS) return rank;
    if (MPI_Comm_group(MPI_COMM_WORLD, &world) == MPI_SUCCESS) {
        MPI_Group_translate_ranks(group, 1, &rank, world, &found);
        MPI_Group_free(&world);
    }
    MPI_Group_free(&group);
    return found;
}

enum hapt_status link_late(MPI_Comm comm, const bool *absent, const char *who, double timeout_s, const char *what)
{
    hapt_link_wait_for_job_end(timeout_s);
    int size = 0, count = 0;
    char names[400] = "its peers";
    size_t length = 0;
    MPI_Comm_size(comm, &size);
    for (int r = 0; r < size; r++) {
        if (!absent[r] || ++count > NAMED) continue;
        const int rank = in_world(comm, r);
        length += (size_t)snprintf(names + length, sizeof names - length, "%srank %d on host %.64s",
                                   count > 1 ? ", " : "", rank, hapt_env_host(rank));
    }
    if (count > NAMED) snprintf(names + length, sizeof names - length, " and %d others", count - NAMED);
    return hapt_fail(HAPT_ERR_COMM, "look for a rank that died or hangs; --timeout sets the limit",
                     "%s waited %.3g s for %s in: %s", who, timeout_s, names, what);
}

#define GATHER_TAG 28673 /* on the caller's communicator */
/* A rank that waits in a later round knows only that one of several ranks is missing. So each round times out a share
 * later: the rank that waits for a single rank reports first. */
#define LATER_SHARE 0.1

/* Posts the blocks of ranks [first, first + count), with wrap-around, as one or two messages. */
static enum hapt_status post_blocks(MPI_Comm comm, bool sends, int peer, int first, int count, size_t bytes, char *all,
                                    MPI_Request *request, int *posted)
{
    int size;
    HAPT_MPI(MPI_Comm_size(comm, &size));
    const int here = first + count > size ? size - first : count;
    for (int part = 0; part < 2; part++) {
        const int blocks = part == 0 ? here : count - here;
        char *data = all + (part == 0 ? (size_t)first * bytes : 0);
        const int length = (int)((size_t)blocks * bytes);
        if (blocks == 0) continue;
        if (sends)
            HAPT_MPI(MPI_Isend(data, length, MPI_BYTE, peer, GATHER_TAG, comm, &request[(*posted)++]));
        else
            HAPT_MPI(MPI_Irecv(data, length, MPI_BYTE, peer, GATHER_TAG, comm, &request[(*posted)++]));
    }
    return HAPT_OK;
}

/* Rank `from` did not send the blocks of `count` ranks, its own first: it is missing, or it waits for one of them. */
static enum hapt_status gather_late(MPI_Comm comm, int rank, int from, int count, double timeout_s, const char *what)
{
    hapt_link_wait_for_job_end(timeout_s);
    char who[40], whose[64] = "";
    const int first = in_world(comm, from);
    snprintf(who, sizeof who, "rank %d", in_world(comm, rank));
    if (count > 1) snprintf(whose, sizeof whose, ", or of one of the %d ranks after it", count - 1);
    return hapt_fail(HAPT_ERR_COMM, "look for a rank that died or hangs; --timeout sets the limit",
                     "%s waited %.3g s for a message from rank %d on host %s%s in: %s", who, timeout_s, first,
                     hapt_env_host(first), whose, what);
}

/* Bruck's algorithm: after round k a rank has the blocks of 2^k ranks, its own first. */
enum hapt_status hapt_link_all_gather(MPI_Comm comm, const char *what, double timeout_s, const void *mine, size_t bytes,
                                      void *all)
{
    int rank, size;
    HAPT_MPI(MPI_Comm_rank(comm, &rank));
    HAPT_MPI(MPI_Comm_size(comm, &size));
    memcpy((char *)all + (size_t)rank * bytes, mine, bytes);
    double deadline_s = hapt_time_s() + timeout_s;
    for (int distance = 1; distance < size; distance *= 2, deadline_s += LATER_SHARE * timeout_s) {
        const int count = distance < size - distance ? distance : size - distance;
        const int to = (rank - distance + size) % size, from = (rank + distance) % size;
        MPI_Request request[4];
        int posted = 0;
        bool late = false;
        HAPT_TRY(post_blocks(comm, false, from, from, count, bytes, all, request, &posted));
        HAPT_TRY(post_blocks(comm, true, to, rank, count, bytes, all, request, &posted));
        HAPT_TRY(link_wait(posted, request, deadline_s, &late));
        if (late) return gather_late(comm, rank, from, count, timeout_s, what);
    }
    return HAPT_OK;
}

enum hapt_status hapt_link_agree(MPI_Comm comm, const char *what, double timeout_s, enum hapt_status status)
{
    int size = 1, all_good = 1;
    MPI_Comm_size(comm, &size);
    int *votes = calloc((size_t)size, sizeof *votes);
    const int mine = (int)status;
    if (!votes) hapt_die(hapt_fail(HAPT_ERR_MEMORY, NULL, "host memory exhausted: an agreement of all ranks"));
    const enum hapt_status gathered = hapt_link_all_gather(comm, what, timeout_s, &mine, sizeof mine, votes);
    if (gathered != HAPT_OK) hapt_die(gathered);
    for (int r = 0; r < size; r++) all_good = all_good && votes[r] == HAPT_OK;
    free(votes);
    return all_good ? HAPT_OK : hapt_env_agree(comm, status); /* all ranks are present: this does not wait */
}

enum hapt_status hapt_link_all_or_none(MPI_Comm comm, const char *what, enum hapt_status status)
{
    int worst = (int)status;
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, &worst, 1, MPI_INT, MPI_MAX, comm));
    if (status != HAPT_OK || worst == HAPT_OK) return status;
    return hapt_fail((enum hapt_status)worst, NULL, "a peer failed before it reached: %s", what);
}
