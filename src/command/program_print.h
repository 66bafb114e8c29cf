/* Programs of a range of layers in readable form: hapt spmd and hapt plan --explain. Private to the room. */
#ifndef HAPT_COMMAND_PROGRAM_PRINT_H
#define HAPT_COMMAND_PROGRAM_PRINT_H

#include "hapt/config.h"
#include "hapt/layers.h"
#include "hapt/program.h"

struct program_listing {
    const struct hapt_graph *graph; /* of the model */
    const struct hapt_layers *layers;
    const struct hapt_sharding *sharding;
    int first, end;                         /* layers */
    bool full;                              /* all of them, not unlike ones once */
    const struct hapt_program_costs *costs; /* NULL: not told */
    int stage;                              /* named where layers of other stages are alike */
};

/* What was printed: layers of other listings that are laid out alike are named instead of printed again. Starts as
 * zeros. */
struct program_printed {
    int count, capacity;
    struct program_kind {
        uint64_t structure;
        int first, end, stage;
    } * kind;
};

/* `printed` NULL: every kind of layer is printed. Layers between which partial sums cross stand together. Rank-local.
 */
enum hapt_status program_print_layers(const struct program_listing *listing, struct program_printed *printed,
                                      struct hapt_arena *arena, FILE *stream);

#endif
