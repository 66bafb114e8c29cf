/* Clocks, threads, and the deterministic hash and random generator for seeds, names and structures. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "hapt/env.h"

static double seconds(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

double hapt_time_s(void)
{
    return seconds(CLOCK_MONOTONIC);
}

double hapt_time_epoch_s(void)
{
    return seconds(CLOCK_REALTIME);
}

const char *hapt_time_iso(double epoch_s, char text[HAPT_TIME_ISO_CHARS])
{
    const time_t whole_s = (time_t)epoch_s;
    struct tm local = {0};
    char day[24], zone[8];
    localtime_r(&whole_s, &local);
    strftime(day, sizeof day, "%Y-%m-%dT%H:%M:%S", &local);
    strftime(zone, sizeof zone, "%z", &local); /* +hhmm */
    snprintf(text, HAPT_TIME_ISO_CHARS, "%s.%03d%.3s:%s", day, (int)((epoch_s - (double)whole_s) * 1000) % 1000, zone,
             zone + 3);
    return text;
}

double hapt_time_thread_cpu_s(void)
{
    return seconds(CLOCK_THREAD_CPUTIME_ID);
}

struct timespec hapt_time_spec(double time_s)
{
    struct timespec due = {.tv_sec = (time_t)time_s};
    due.tv_nsec = (long)((time_s - (double)due.tv_sec) * 1e9);
    return due;
}

void hapt_time_sleep_until(double time_s)
{
    const struct timespec due = hapt_time_spec(time_s);
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL) == EINTR) {
    }
}

void hapt_time_condition_init(pthread_cond_t *condition)
{
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &clock);
    pthread_condattr_destroy(&clock);
}

int hapt_thread_start(pthread_t *thread, void *(*run)(void *argument), void *argument)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int error = pthread_create(thread, NULL, run, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

int hapt_compare_doubles(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double hapt_median(double *value, int64_t count)
{
    if (count == 0) return 0;
    qsort(value, (size_t)count, sizeof *value, hapt_compare_doubles);
    return 0.5 * (value[(count - 1) / 2] + value[count / 2]);
}

static uint64_t mix(uint64_t value)
{
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
    return value ^ (value >> 31);
}

uint64_t hapt_hash_begin(uint64_t seed)
{
    return 0xcbf29ce484222325u ^ mix(seed + 0x9e3779b97f4a7c15u);
}

uint64_t hapt_hash_add(uint64_t hash, const void *data, size_t bytes)
{
    const unsigned char *byte = data;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ byte[i]) * 0x100000001b3u;
    return hash;
}

uint64_t hapt_hash_end(uint64_t hash, size_t bytes)
{
    return mix(hash ^ bytes);
}

uint64_t hapt_hash(uint64_t seed, const void *data, size_t bytes)
{
    return hapt_hash_end(hapt_hash_add(hapt_hash_begin(seed), data, bytes), bytes);
}

uint64_t hapt_hash_word(uint64_t seed, int64_t value)
{
    return mix((seed + 0x9e3779b97f4a7c15u) ^ mix((uint64_t)value));
}

uint64_t hapt_random_next(uint64_t *state)
{
    return mix(*state += 0x9e3779b97f4a7c15u);
}

double hapt_random_unit(uint64_t *state)
{
    return (double)(hapt_random_next(state) >> 11) * 0x1p-53;
}
