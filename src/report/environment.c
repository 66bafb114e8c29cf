/* Prints the environment of a run: versions common to all ranks, then host by host. */
#include <stdio.h>
#include <string.h>

#include "hapt/report.h"

static bool same(const struct hapt_report *report, int64_t a, int64_t b)
{
    const struct hapt_environment *x = &report->environment[a], *y = &report->environment[b];
    return !strcmp(x->hapt, y->hapt) && !strcmp(x->mpi, y->mpi) && !strcmp(x->hdf5, y->hdf5) &&
           !strcmp(x->hwloc, y->hwloc);
}

static void print_versions(const struct hapt_env *env, const struct hapt_report *report, int64_t rank)
{
    const struct hapt_environment *its = &report->environment[rank];
    hapt_print(env, "  hapt %s, %s, HDF5 %s, hwloc %s\n", its->hapt, its->mpi, its->hdf5, its->hwloc);
}

static void print_rank(const struct hapt_env *env, const struct hapt_report *report, int64_t rank)
{
    const struct hapt_environment *its = &report->environment[rank];
    char stage[32] = "idle";
    if (its->stage >= 0) snprintf(stage, sizeof stage, "stage %lld", (long long)its->stage);
    hapt_print(env, "    rank %lld: %s, %s (%s%s%s) of %s, %lld threads, cpus %s, pid %lld\n", (long long)rank, stage,
               its->device, its->back_end, its->libraries[0] ? ", " : "", its->libraries, its->subcluster,
               (long long)its->threads, its->cpus, (long long)its->pid);
}

void hapt_report_print_environment(const struct hapt_env *env, const struct hapt_report *report)
{
    bool alike = true;
    if (report->rank_count == 0) return; /* an older run file without an environment */
    for (int64_t r = 1; r < report->rank_count; r++) alike = alike && same(report, 0, r);
    hapt_print(env, "\nEnvironment\n");
    if (alike) print_versions(env, report, 0);
    for (int64_t first = 0; first < report->rank_count; first++) {
        const struct hapt_environment *host = &report->environment[first];
        bool seen = false;
        for (int64_t r = 0; r < first; r++) seen = seen || !strcmp(report->environment[r].host, host->host);
        if (seen) continue;
        hapt_print(env, "  host %s, %s, interfaces: %s\n", host->host, host->kernel,
                   host->interfaces[0] ? host->interfaces : "none");
        for (int64_t r = first; r < report->rank_count; r++) {
            if (strcmp(report->environment[r].host, host->host) != 0) continue;
            print_rank(env, report, r);
            if (!alike) print_versions(env, report, r);
        }
    }
}
