/*
 * Windows: engines of long layer ranges on which every range inside is timed. One reservation and one binding serve
 * hundreds of candidates; what runs is what a stage of that range runs: the same kernels on the same shapes, its
 * boundaries copied from and to transfer buffers.
 */
#ifndef HAPT_PROFILE_WINDOW_H
#define HAPT_PROFILE_WINDOW_H

#include "candidates.h"

struct window {
    int first, last, degree; /* layers [first, last], index of the device count */
    double bytes;
    struct hapt_arena arena;
    struct hapt_program *program;
    struct hapt_engine *engine; /* NULL while closed */
    void *feed; /* on the device, as transfer slots are: random values that enter a range; then what leaves it */
    size_t feed_bytes;
};

/* What enters and leaves an item's range: [0] forward in, [1] backward in, [2] backward out. */
struct crossing {
    int count;
    int *tensor;
};
struct crossings {
    struct crossing list[3];
};

struct windows {
    const struct candidates *candidates;
    struct hapt_engine_options options;
    double limit_bytes; /* that open windows may hold together */
    int count;
    int opened; /* engines made so far */
    bool warm;  /* the device has worked */
    struct window *window;
    int *window_of;              /* [item_count] or -1 */
    struct crossings *crossings; /* [item_count] of items that have a window */
};

/* Chooses windows for the items marked in `needed`, from the memory of all items. */
enum hapt_status windows_choose(const struct candidates *candidates, const struct hapt_engine_options *options,
                                double limit_bytes, const struct item_memory *memory, const bool *needed,
                                struct hapt_arena *arena, struct windows *windows);
void windows_close(struct windows *windows);
/* Runs an item's forward and backward once and times both: thread CPU time on the cpu back end, else by the device's
 * clock. */
enum hapt_status windows_time(struct windows *windows, int item, double *forward_s, double *backward_s);
/* Runs forward and backward of a whole window and times every step, by the same clock: forward_s and backward_s are as
 * long as the sections of windows->window[w].program, which is there from the first call on. */
enum hapt_status windows_open(struct windows *windows, int w);
enum hapt_status windows_time_steps(struct windows *windows, int w, double *forward_s, double *backward_s);
/* Seconds of what the end of a step does to one trained element: [0] update, [1] norm and clearing. Each is met as it
 * is in training: behind forward and backward, which have filled the caches with other things. */
enum hapt_status windows_time_update(struct windows *windows, int item, double s_per_element[2]);

#endif
