/*
 * From instruction lists to traces. emit_walk.c turns the list of a submesh into calls of a format's functions; each
 * format writes them in its own way (emit_simgrid.c, emit_chakra.c). emit.c makes the step and the files.
 */
#ifndef HAPT_STUDY_EMIT_H
#define HAPT_STUDY_EMIT_H

#include <stdio.h>

#include "hapt/atomic_file.h"
#include "hapt/emit.h"

enum { EMIT_MOST_PATH = 4096 };

/* A new file that replaces FOLDER/NAME when it is complete. */
struct emit_output {
    char path[EMIT_MOST_PATH], aside[EMIT_MOST_PATH + HAPT_TEMPORARY_SUFFIX_BYTES];
    int descriptor;
    FILE *file;
};
enum hapt_status emit_output_open(struct emit_output *output, const char *folder, const char *name);
/* `status` other than HAPT_OK: the file is dropped. */
enum hapt_status emit_output_close(struct emit_output *output, enum hapt_status status);

enum emit_direction { EMIT_FORWARD, EMIT_BACKWARD, EMIT_DIRECTIONS };

/* The messages from one submesh to another that belong together, in order, each with a number. */
struct emit_channel {
    int index;                /* in step->channel */
    int tag;                  /* of its messages */
    int from, to;             /* submeshes */
    int from_chunk, to_chunk; /* -1: tied gradients */
    int port;                 /* its messages and those of other channels with the same port take turns; -1: none */
    double cost_s, bytes;     /* of one message */
};

struct emit_step {
    const struct hapt_schedule *schedule;
    struct hapt_costs costs;
    int channel_count;
    /* One for each edge of the schedule, then two for tied gradients: first to last submesh and back. from = -1: no
     * such channel. */
    struct emit_channel *channel;
};

struct emit_trace {
    const struct emit_step *step;
    int submesh;
    FILE *file;
    void *state; /* of the format */
};

/* A file that a format needs beside the traces. */
struct emit_file {
    const char *name;
    void (*write)(const struct emit_step *step, FILE *file);
};

/* A message is the number `at` of its channel. Receives are posted, and messages sent, in order of `at`. */
struct emit_functions {
    const char *file_name; /* with the rank as %d */
    bool waits_at_end;     /* for the last sends */
    enum hapt_status (*begin)(struct emit_trace *trace, struct hapt_arena *arena);
    void (*compute)(struct emit_trace *trace, const char *name, const struct hapt_instruction *at, double time_s);
    void (*post)(struct emit_trace *trace, const struct emit_channel *channel, int at);    /* a receive */
    void (*receive)(struct emit_trace *trace, const struct emit_channel *channel, int at); /* waits for it */
    void (*send)(struct emit_trace *trace, const struct emit_channel *channel, int at);
    void (*sent)(struct emit_trace *trace, const struct emit_channel *channel, int at); /* waits for the send */
    /* Optional: the receive that is posted next takes the slot from which that message is sent. NULL: it does not wait.
     */
    void (*passes_on)(struct emit_trace *trace, const struct emit_channel *channel, int at);
    void (*end)(struct emit_trace *trace);
    const struct emit_file *file; /* the last has no name */
};

/* The calls for one submesh, begin to end. */
enum hapt_status emit_walk(const struct emit_functions *functions, struct emit_trace *trace, struct hapt_arena *arena);

extern const struct emit_functions emit_simgrid, emit_chakra_et, emit_chakra_json;

#endif
