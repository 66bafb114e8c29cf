#include "hapt/span_log.h"

enum hapt_status hapt_span_log_init(struct hapt_span_log *log, int64_t capacity, struct hapt_arena *arena)
{
    *log = (struct hapt_span_log){.capacity = capacity};
    pthread_mutex_init(&log->lock, NULL);
    HAPT_NEW(log->span, arena, capacity);
    return HAPT_OK;
}

void hapt_span_log_add(struct hapt_span_log *log, enum hapt_span_kind kind, double begin_s, double end_s)
{
    if (!log) return;
    pthread_mutex_lock(&log->lock);
    if (!log->paused) log->span[log->count++ % log->capacity] = (struct hapt_span){kind, begin_s, end_s};
    pthread_mutex_unlock(&log->lock);
}

void hapt_span_log_pause(struct hapt_span_log *log, bool paused)
{
    pthread_mutex_lock(&log->lock);
    log->paused = paused;
    pthread_mutex_unlock(&log->lock);
}

int64_t hapt_span_log_read(struct hapt_span_log *log, double from_s, struct hapt_span *span)
{
    int64_t read = 0;
    pthread_mutex_lock(&log->lock);
    for (int64_t k = log->count > log->capacity ? log->count - log->capacity : 0; k < log->count; k++)
        if (log->span[k % log->capacity].begin_s >= from_s) span[read++] = log->span[k % log->capacity];
    pthread_mutex_unlock(&log->lock);
    return read;
}
