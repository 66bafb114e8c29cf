/* Prints the programs of a range of layers, for hapt spmd and hapt plan --explain. Private to src/command. */
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
    bool full;                              /* print every layer, not one of each kind */
    const struct hapt_program_costs *costs; /* NULL: no costs are printed */
    int stage;                              /* named when layers of a later stage are equal */
};

/* Kinds of layers already printed; an equal layer of a later listing is named, not printed again. Starts as zeros. */
struct program_printed {
    int count, capacity;
    struct program_kind {
        uint64_t structure;
        int first, end, stage;
    } * kind;
};

/* `printed` NULL: every kind of layer is printed. Layers with partial sums across their boundary are printed together.
 * Rank-local. */
enum hapt_status program_print_layers(const struct program_listing *listing, struct program_printed *printed,
                                      struct hapt_arena *arena, FILE *stream);

#endif
