/*
 * What measuring would take, found before anything is reserved: time by the roofline of the device's description,
 * corrected by one layer that is run where the answer is close; memory by the memory plans of the ranges that would be
 * run.
 *
 * Refused is what would take over AFFORD_SECONDS, or a longer --profile-seconds, or over half of the free memory of a
 * host.
 */
#ifndef HAPT_PROFILE_AFFORD_H
#define HAPT_PROFILE_AFFORD_H

#include "classes.h"
#include "window.h"

#define AFFORD_SECONDS 60.0

/* The work about to be measured; on ranks that measure nothing the windows are empty. */
struct afford_question {
    const struct hapt_env *env;
    const struct hapt_config *config;
    const struct candidates *candidates;
    const struct classes *classes;
    const struct windows *windows;    /* as chosen, nothing open */
    const bool *needed;               /* [item] */
    const struct item_memory *memory; /* [item] */
    int whole_rounds;                 /* > 0: so many rounds over whole windows; 0: rounds over items */
    bool teams;                       /* all ranks of a host will run stages at the same time */
};

/* Bytes that the windows of one rank may hold: its part of half of the host's free memory; INFINITY for devices with
 * memory of their own. */
double afford_room(const struct hapt_engine_options *options, const struct classes *classes);
/* HAPT_ERR_USAGE where it would take too long or too much memory. Collective over env->world; agrees and prints. */
enum hapt_status afford_check(const struct afford_question *question, struct hapt_arena *scratch);

#endif
