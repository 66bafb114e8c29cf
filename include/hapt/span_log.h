/*
 * Times at which copies of offloaded data and updates on the host ran, for timelines. A ring keeps the newest. Several
 * threads write to it.
 */
#ifndef HAPT_SPAN_LOG_H
#define HAPT_SPAN_LOG_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "hapt/arena.h"
#include "hapt/status.h"

enum hapt_span_kind { HAPT_SPAN_TO_DEVICE, HAPT_SPAN_TO_HOST, HAPT_SPAN_HOST_UPDATE };

struct hapt_span {
    enum hapt_span_kind kind;
    double begin_s, end_s; /* hapt_time_s */
};

struct hapt_span_log {
    pthread_mutex_t lock;
    int64_t capacity, count; /* count: of all so far */
    bool paused;
    struct hapt_span *span; /* span k is in k % capacity */
};

enum hapt_status hapt_span_log_init(struct hapt_span_log *log, int64_t capacity, struct hapt_arena *arena);
/* Log NULL: nothing happens. */
void hapt_span_log_add(struct hapt_span_log *log, enum hapt_span_kind kind, double begin_s, double end_s);
/* Paused: nothing is added. */
void hapt_span_log_pause(struct hapt_span_log *log, bool paused);
/* Copies those that began at `from_s` or later, the oldest first; returns their number, at most `capacity`. */
int64_t hapt_span_log_read(struct hapt_span_log *log, double from_s, struct hapt_span *span);

#endif
