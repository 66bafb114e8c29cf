/*
 * Cost of measuring, estimated before anything is reserved. The time is a roofline of the device's description; if it
 * is close to the limit, a run of one layer corrects it. The memory comes from the memory plans of the ranges to be
 * run.
 *
 * Measuring is refused if it would take over AFFORD_SECONDS (or a longer --profile-seconds), or over half of a host's
 * free memory.
 */
#ifndef HAPT_MEASURE_AFFORD_H
#define HAPT_MEASURE_AFFORD_H

#include "bench_engine.h"
#include "classes.h"

#define AFFORD_SECONDS 60.0

/* The work about to be measured; ranks that measure nothing have no benchmark engines. */
struct afford_question {
    const struct hapt_env *env;
    const struct hapt_config *config;
    const struct hapt_candidates *candidates;
    const struct classes *classes;
    const struct bench_engines *bench_engines; /* as chosen; none is open */
    const bool *needed;                        /* [item] */
    const struct hapt_item_memory *memory;     /* [item] */
    const bool *run_by_teams;                  /* [item] teams run it at least a few times; NULL: none */
    int whole_rounds;                          /* > 0: rounds over complete benchmark engines; 0: rounds over items */
    bool teams;                                /* all ranks of a host will run stages at the same time */
};

/* Byte limit for the benchmark engines of one rank: its part of half of the host's free memory. INFINITY for
 * devices with their own memory. */
double afford_room(const struct hapt_engine_options *options, const struct classes *classes);
/* HAPT_ERR_USAGE if it would take too long or too much memory. Collective over env->world; agrees and prints. */
enum hapt_status afford_check(const struct afford_question *question, struct hapt_arena *scratch);

#endif
