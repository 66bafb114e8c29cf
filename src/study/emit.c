/* The traces of a plan: the step with its channels, and the files of a format. */
#include "emit.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "hapt/folder.h"

enum { MOST_FORMS = 2 };

static const struct {
    const char *name;
    const struct emit_functions *form[MOST_FORMS]; /* each writes a file per rank; NULL: no further one */
} formats[] = {[HAPT_EMIT_SIMGRID] = {"simgrid", {&emit_simgrid}},
               [HAPT_EMIT_CHAKRA] = {"chakra", {&emit_chakra_et, &emit_chakra_json}}};
enum { FORMATS = sizeof formats / sizeof *formats };

bool hapt_emit_format_parse(const char *name, enum hapt_emit_format *format)
{
    for (int k = 0; k < FORMATS; k++) {
        if (strcmp(name, formats[k].name) != 0) continue;
        *format = (enum hapt_emit_format)k;
        return true;
    }
    return false;
}

static bool is_file_of(const struct emit_functions *functions, const char *name)
{
    char own[64];
    int rank;
    if (sscanf(name, "rank.%d.", &rank) == 1) {
        snprintf(own, sizeof own, functions->file_name, rank);
        return strcmp(name, own) == 0;
    }
    for (const struct emit_file *file = functions->file; file->name; file++)
        if (strcmp(name, file->name) == 0) return true;
    return false;
}

bool hapt_emit_is_own(const char *name)
{
    for (int k = 0; k < FORMATS; k++)
        for (int form = 0; form < MOST_FORMS && formats[k].form[form]; form++)
            if (is_file_of(formats[k].form[form], name)) return true;
    return false;
}

/* ---- The step ---- */

/* Bytes in `time_s` over a link of the assumed bandwidth, where no profile gives them. */
static double bytes_of(const struct hapt_profile *profile, const double *bytes, int layer, double time_s)
{
    if (!profile) return time_s * HAPT_EMIT_BANDWIDTH_BYTES_PER_S;
    return bytes ? bytes[layer] : 0;
}

/* The schedule's channel of an edge, if it leads to several submeshes; -1: to one. */
static int port_of(const struct hapt_schedule *schedule, int e)
{
    const struct hapt_schedule_edges *edges = &schedule->edges;
    for (int other = 0; other < edges->count; other++)
        if (edges->channel_of[other] == edges->channel_of[e] &&
            schedule->submesh_of[edges->edge[other].to] != schedule->submesh_of[edges->edge[e].to])
            return edges->channel_of[e];
    return -1;
}

static void open_edge(const struct hapt_plan *plan, const struct hapt_profile *profile, struct emit_step *step, int e)
{
    const struct hapt_schedule *schedule = step->schedule;
    const struct hapt_schedule_edge *edge = &schedule->edges.edge[e];
    const int low = edge->from < edge->to ? edge->from : edge->to;
    const double cost_s = step->costs.edge_s ? step->costs.edge_s[e] : step->costs.comm_s[low];
    const double bytes = plan->edge_count > 0 ? hapt_plan_sent_edge(plan, e)->bytes
                                              : bytes_of(profile, profile ? profile->boundary_bytes : NULL,
                                                         plan->stage[low].end_layer - 1, cost_s);
    step->channel[e] = (struct emit_channel){.index = e,
                                             .tag = plan->edge_count > 0 ? e : EMIT_DIRECTIONS * low + edge->backward,
                                             .from = schedule->submesh_of[edge->from],
                                             .to = schedule->submesh_of[edge->to],
                                             .from_chunk = edge->from,
                                             .to_chunk = edge->to,
                                             .port = port_of(schedule, e),
                                             .cost_s = cost_s,
                                             .bytes = bytes};
}

static void open_tied(struct emit_step *step, int index, int from, int to, double bytes)
{
    const int chunks = step->schedule->chunk_count, edges = step->schedule->edges.count;
    const int first = edges > EMIT_DIRECTIONS * chunks ? edges : EMIT_DIRECTIONS * chunks;
    step->channel[index] = (struct emit_channel){.index = index,
                                                 .tag = first + index - edges,
                                                 .from = from,
                                                 .to = to,
                                                 .from_chunk = -1,
                                                 .to_chunk = -1,
                                                 .port = -1,
                                                 .cost_s = step->costs.exchange_s,
                                                 .bytes = bytes};
}

static enum hapt_status make_step(const struct hapt_plan *plan, const struct hapt_profile *profile,
                                  struct hapt_arena *arena, struct emit_step *step)
{
    struct hapt_schedule *schedule;
    HAPT_TRY(hapt_plan_lay_out(plan, arena, &schedule, &step->costs));
    const int chunks = schedule->chunk_count, tied = schedule->edges.count;
    const int first = schedule->submesh_of[0], last = schedule->submesh_of[chunks - 1];
    step->schedule = schedule;
    step->channel_count = tied + 2;
    HAPT_NEW(step->channel, arena, step->channel_count);
    for (int c = 0; c < step->channel_count; c++) step->channel[c].from = -1;
    for (int e = 0; e < schedule->edges.count; e++)
        if (schedule->edges.channel_of[e] >= 0) open_edge(plan, profile, step, e);
    if (step->costs.exchange_s > 0 && first != last) {
        const double bytes = bytes_of(profile, profile ? profile->tied_bytes : NULL,
                                      plan->stage[chunks - 1].first_layer, step->costs.exchange_s);
        open_tied(step, tied, first, last, bytes);
        open_tied(step, tied + 1, last, first, bytes);
    }
    return HAPT_OK;
}

/* ---- The files ---- */

static enum hapt_status cannot_write(const struct emit_output *output, int error)
{
    if (output->aside[0]) unlink(output->aside);
    return hapt_fail(HAPT_ERR_IO, "check the folder and its free space", "%s cannot be written: %s", output->path,
                     strerror(error));
}

enum hapt_status emit_output_open(struct emit_output *output, const char *folder, const char *name)
{
    if (snprintf(output->path, sizeof output->path, "%s/%s", folder, name) >= (int)sizeof output->path)
        return hapt_fail(HAPT_ERR_IO, "use a shorter path", "path too long: %.60s...", folder);
    output->descriptor = hapt_atomic_file_open(output->path, output->aside, sizeof output->aside);
    if (output->descriptor < 0) return cannot_write(output, errno);
    const int copy = fcntl(output->descriptor, F_DUPFD_CLOEXEC, 0); /* fclose closes the copy, the commit the other */
    output->file = copy < 0 ? NULL : fdopen(copy, "w");
    if (output->file) return HAPT_OK;
    const int error = errno;
    if (copy >= 0) close(copy);
    close(output->descriptor);
    return cannot_write(output, error);
}

enum hapt_status emit_output_close(struct emit_output *output, enum hapt_status status)
{
    int error = !ferror(output->file) ? 0 : errno ? errno : EIO; /* each flush since has failed for the same reason */
    errno = 0;
    if (fclose(output->file) != 0 && error == 0) error = errno ? errno : EIO;
    if (status != HAPT_OK || error != 0) close(output->descriptor);
    if (status != HAPT_OK) {
        unlink(output->aside);
        return status;
    }
    if (error == 0) error = hapt_atomic_file_commit(output->descriptor, output->aside, output->path);
    return error == 0 ? HAPT_OK : cannot_write(output, error);
}

static enum hapt_status write_trace(const struct emit_functions *functions, const struct emit_step *step, int submesh,
                                    const char *folder)
{
    struct emit_output output;
    struct hapt_arena arena;
    char name[64];
    snprintf(name, sizeof name, functions->file_name, submesh);
    HAPT_TRY(emit_output_open(&output, folder, name));
    struct emit_trace trace = {.step = step, .submesh = submesh, .file = output.file};
    hapt_arena_init(&arena);
    const enum hapt_status status = emit_walk(functions, &trace, &arena);
    hapt_arena_release(&arena);
    return emit_output_close(&output, status);
}

/* The script that replays the traces is the last file: with it the folder is complete. */
static enum hapt_status write_files(const struct emit_functions *functions, const struct emit_step *step,
                                    const char *folder)
{
    for (int s = 0; s < step->schedule->submesh_count; s++) HAPT_TRY(write_trace(functions, step, s, folder));
    for (const struct emit_file *file = functions->file; file->name; file++) {
        struct emit_output output;
        HAPT_TRY(emit_output_open(&output, folder, file->name));
        file->write(step, output.file);
        HAPT_TRY(emit_output_close(&output, HAPT_OK));
    }
    return HAPT_OK;
}

enum hapt_status hapt_emit_write(const struct hapt_plan *plan, const struct hapt_profile *profile,
                                 enum hapt_emit_format format, const char *folder)
{
    struct hapt_arena arena;
    struct emit_step step;
    if (plan->blocking)
        return hapt_fail(HAPT_ERR_USAGE, "simulate it with --blocking no, or leave out --emit",
                         "traces overlap transfers with computing, but this plan is priced without overlap");
    if (profile && profile->layer_count != plan->layer_count)
        return hapt_fail(HAPT_ERR_INPUT, "give the profile that the plan was made from",
                         "the plan has %d layers, the profile %d", plan->layer_count, profile->layer_count);
    hapt_arena_init(&arena);
    enum hapt_status status = make_step(plan, profile, &arena, &step);
    if (status == HAPT_OK) status = hapt_folder_make(folder);
    for (int form = 0; status == HAPT_OK && form < MOST_FORMS && formats[format].form[form]; form++)
        status = write_files(formats[format].form[form], &step, folder);
    if (status == HAPT_OK) status = hapt_folder_sync(folder);
    hapt_arena_release(&arena);
    return status;
}
