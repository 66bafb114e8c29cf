/* Writes the timeline of a run as a trace viewer's file. */
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "hapt/atomic_file.h"
#include "hapt/h5.h"
#include "hapt/report.h"

#define MAX_EVENTS ((int64_t)1 << 28)
#define MAX_TIME_S 1e12

/* Events beside the instructions of a rank have tracks of their own, numbered behind those of all ranks. */
static const char *const beside[] = {"copy to device", "copy to host", "host update"};
enum { BESIDE = sizeof beside / sizeof *beside, MOST_RANKS = 10000000 };

/* Trace viewers require UTF-8; kinds of events are printable ASCII. */
static bool is_plain(const char *text)
{
    while (*text >= 0x20 && *text < 0x7f) text++;
    return !*text;
}

static enum hapt_status read_columns(struct hapt_h5 *file, struct hapt_arena *arena, struct hapt_report_trace *columns)
{
    int64_t shape[1] = {-1};
    const struct {
        const char *name;
        enum hapt_h5_type type;
        void **to;
    } part[] = {{"/trace/rank", HAPT_H5_I64, (void **)&columns->rank},
                {"/trace/stage", HAPT_H5_I64, (void **)&columns->stage},
                {"/trace/step", HAPT_H5_I64, (void **)&columns->step},
                {"/trace/microbatch", HAPT_H5_I64, (void **)&columns->microbatch},
                {"/trace/begin", HAPT_H5_F64, (void **)&columns->begin_s},
                {"/trace/end", HAPT_H5_F64, (void **)&columns->end_s}};
    for (size_t i = 0; i < sizeof part / sizeof *part; i++)
        HAPT_TRY(hapt_h5_read(file, part[i].name, part[i].type, 1, shape, MAX_EVENTS, arena, part[i].to));
    HAPT_TRY(hapt_h5_read_strings(file, "/trace/kind", MAX_EVENTS, arena, &columns->count, &columns->kind));
    if (hapt_h5_has_attribute(file, "/plan", "exchange_bytes"))
        HAPT_TRY(hapt_h5_read_attribute_real(file, "/plan", "exchange_bytes", &columns->exchange_bytes));
    if (columns->count != shape[0])
        return hapt_fail(HAPT_ERR_INPUT, "the file is damaged", "%s: the columns of /trace differ in length",
                         hapt_h5_path(file));
    for (int64_t i = 0; i < columns->count; i++)
        if (!(fabs(columns->begin_s[i]) < MAX_TIME_S && fabs(columns->end_s[i]) < MAX_TIME_S) || columns->rank[i] < 0 ||
            columns->rank[i] >= MOST_RANKS || !is_plain(columns->kind[i]))
            return hapt_fail(HAPT_ERR_INPUT, "the file is damaged", "%s: row %lld of /trace is not an event",
                             hapt_h5_path(file), (long long)i);
    return HAPT_OK;
}

/* Index into `beside`, or -1. */
static int track_of(const char *kind)
{
    for (int k = 0; k < BESIDE; k++)
        if (strcmp(kind, beside[k]) == 0) return k;
    return -1;
}

static int64_t thread_of(const struct hapt_report_trace *columns, int64_t i)
{
    const int track = track_of(columns->kind[i]);
    return track < 0 ? columns->rank[i] : (int64_t)MOST_RANKS + BESIDE * columns->rank[i] + track;
}

/* Messages become instant events; instructions become events with a duration. */
static json_t *event_of(const struct hapt_report_trace *columns, int64_t i)
{
    char text[80];
    const char *kind = columns->kind[i];
    const bool message = strstr(kind, " left") || strstr(kind, " there");
    if (columns->microbatch[i] >= 0)
        snprintf(text, sizeof text, "%.40s %lld", kind, (long long)columns->microbatch[i]);
    else
        snprintf(text, sizeof text, "%.40s", kind);
    json_t *event =
        json_pack("{s:s, s:s, s:s, s:f, s:I, s:I, s:{s:I}}", "name", text, "cat", kind, "ph", message ? "i" : "X", "ts",
                  1e6 * columns->begin_s[i], "pid", (json_int_t)columns->stage[i], "tid",
                  (json_int_t)thread_of(columns, i), "args", "step", (json_int_t)columns->step[i]);
    if (event && columns->exchange_bytes > 0 && strcmp(kind, "exchange") == 0)
        json_object_set_new(json_object_get(event, "args"), "bytes", json_real(columns->exchange_bytes));
    if (event && message) json_object_set_new(event, "s", json_string("t"));
    if (event && !message)
        json_object_set_new(event, "dur", json_real(1e6 * (columns->end_s[i] - columns->begin_s[i])));
    return event;
}

static json_t *name_of_stage(int64_t stage)
{
    char text[40];
    snprintf(text, sizeof text, "stage %lld", (long long)stage);
    return json_pack("{s:s, s:s, s:I, s:{s:s}}", "name", "process_name", "ph", "M", "pid", (json_int_t)stage, "args",
                     "name", text);
}

/* The name of its track, for an event beside the instructions. */
static json_t *name_of_track(const struct hapt_report_trace *columns, int64_t i)
{
    char text[80];
    snprintf(text, sizeof text, "rank %lld: %s", (long long)columns->rank[i], beside[track_of(columns->kind[i])]);
    return json_pack("{s:s, s:s, s:I, s:I, s:{s:s}}", "name", "thread_name", "ph", "M", "pid",
                     (json_int_t)columns->stage[i], "tid", (json_int_t)thread_of(columns, i), "args", "name", text);
}

static json_t *all_events(const struct hapt_report_trace *columns)
{
    json_t *events = json_array();
    int64_t stages = 0, last_rank = -1;
    unsigned named = 0; /* tracks of the current rank; rows are in order of ranks */
    bool complete = events != NULL;
    for (int64_t i = 0; i < columns->count; i++) {
        complete = complete && json_array_append_new(events, event_of(columns, i)) == 0;
        const int track = track_of(columns->kind[i]);
        if (columns->rank[i] != last_rank) named = 0;
        last_rank = columns->rank[i];
        if (track >= 0 && !(named >> track & 1u))
            complete = complete && json_array_append_new(events, name_of_track(columns, i)) == 0;
        if (track >= 0) named |= 1u << track;
        if (columns->stage[i] >= stages) stages = columns->stage[i] + 1;
    }
    for (int64_t s = 0; s < stages && s < 100000; s++)
        complete = complete && json_array_append_new(events, name_of_stage(s)) == 0;
    if (complete) return json_pack("{s:s, s:o}", "displayTimeUnit", "ms", "traceEvents", events);
    json_decref(events);
    return NULL;
}

static int write_events(int descriptor, const void *root)
{
    errno = 0;
    if (json_dumpfd(root, descriptor, JSON_COMPACT | JSON_REAL_PRECISION(12)) == 0) return 0;
    return errno ? errno : EIO;
}

enum hapt_status hapt_report_trace_load(const char *run_path, struct hapt_arena *arena,
                                        struct hapt_report_trace **trace)
{
    struct hapt_h5 *file = NULL;
    struct hapt_report_trace *read = NULL;
    HAPT_TRY(hapt_h5_open(run_path, "hapt-run", 1, false, &file));
    enum hapt_status status = HAPT_OK;
    if (hapt_h5_exists(file, "/trace/begin")) {
        read = hapt_arena_alloc(arena, 1, sizeof *read);
        status = read ? read_columns(file, arena, read) : HAPT_ERR_MEMORY;
    }
    hapt_h5_close(file);
    if (status == HAPT_OK) *trace = read;
    return status;
}

enum hapt_status hapt_report_trace(const char *run_path, const char *path)
{
    struct hapt_arena arena;
    struct hapt_report_trace *columns = NULL;
    hapt_arena_init(&arena);
    enum hapt_status status = hapt_report_trace_load(run_path, &arena, &columns);
    if (status == HAPT_OK && !columns)
        status = hapt_fail(HAPT_ERR_INPUT, "run it with --trace 1, which keeps the timeline of the last step",
                           "%s holds no timeline", run_path);
    json_t *root = status == HAPT_OK ? all_events(columns) : NULL;
    if (status == HAPT_OK && !root) status = hapt_fail(HAPT_ERR_MEMORY, NULL, "host memory exhausted");
    if (status == HAPT_OK) status = hapt_atomic_file_replace(path, write_events, root);
    json_decref(root);
    hapt_arena_release(&arena);
    return status;
}
