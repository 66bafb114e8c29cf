/*
 * Benchmark engines: engines of long layer ranges, on which every range inside is timed. One reservation and
 * one binding serve hundreds of candidates. A run is the same as in a stage of that range: the same kernels on the same
 * shapes, and boundaries copied from and to transfer buffers.
 */
#ifndef HAPT_MEASURE_BENCH_ENGINE_H
#define HAPT_MEASURE_BENCH_ENGINE_H

#include "hapt/candidates.h"

struct bench_engine {
    int first, last, mesh_index; /* layers [first, last] */
    double bytes;
    struct hapt_arena arena;
    struct hapt_program *program;
    struct hapt_engine *engine; /* NULL while closed */
    /* memory like a transfer slot's, on the device: random values that enter a range, then the values that leave it */
    void *boundary_buffer;
    size_t boundary_buffer_bytes;
};

/* Boundary tensors of an item's range: [0] forward in, [1] backward in, [2] backward out. */
struct crossing {
    int count;
    int *tensor;
};
struct crossings {
    struct crossing list[3];
};

struct bench_engines {
    const struct hapt_candidates *candidates;
    struct hapt_engine_options options;
    double limit_bytes; /* for all open benchmark engines together */
    int count;
    int opened;          /* number of engines created */
    bool warm;           /* the device has worked */
    double copied_share; /* of the updates that were timed: copies of state on the host */
    struct bench_engine *bench_engine;
    int *bench_engine_of;        /* [item_count] or -1 */
    struct crossings *crossings; /* [item_count] of items that have a benchmark engine */
};

/* Chooses benchmark engines for the items marked in `needed`, from the memory of all items. */
enum hapt_status bench_engines_choose(const struct hapt_candidates *candidates,
                                      const struct hapt_engine_options *options, double limit_bytes,
                                      const struct hapt_item_memory *memory, const bool *needed,
                                      struct hapt_arena *arena, struct bench_engines *bench_engines);
void bench_engines_close(struct bench_engines *bench_engines);
/* Runs an item's forward and backward once and times both: thread CPU time on the cpu back end, else the device's
 * clock. */
enum hapt_status bench_engines_time(struct bench_engines *bench_engines, int item, double *forward_s,
                                    double *backward_s);
/* Seconds of the part of an item's backward pass that a split defers, and of the whole pass, by the same clock. Without
 * the copies of boundaries. */
enum hapt_status bench_engines_time_weight(struct bench_engines *bench_engines, int item, double *weight_s,
                                           double *backward_s);
/* Seconds of a split backward pass of a benchmark engine's range with what it defers, and of the unsplit pass. Without
 * the copies of boundaries. *split_s NaN: no second engine fits. */
enum hapt_status bench_engines_time_split(struct bench_engines *bench_engines, int w, double *split_s,
                                          double *backward_s);
/* bench_engines_time_steps runs forward and backward of a complete benchmark engine and times every step, by the same
 * clock. forward_s and backward_s are as long as the sections of bench_engines->bench_engine[w].program, which
 * bench_engines_open creates. */
enum hapt_status bench_engines_open(struct bench_engines *bench_engines, int w);
enum hapt_status bench_engines_time_steps(struct bench_engines *bench_engines, int w, double *forward_s,
                                          double *backward_s);
/* Seconds per trained element at the end of a step: [0] update, [1] norm and clearing. Both run as in training:
 * after forward and backward, which have filled the caches with other data. */
enum hapt_status bench_engines_time_update(struct bench_engines *bench_engines, int item, double s_per_element[2]);

#endif
