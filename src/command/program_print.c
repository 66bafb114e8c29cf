/* Prints programs, one for each kind of layer. */
#include "program_print.h"

#include <math.h>
#include <string.h>

struct printing {
    const struct program_listing *listing;
    struct program_printed *printed;
    struct hapt_arena *arena;
    FILE *stream;
    int ranges, *end;    /* [ranges] end layer of each range of layers that are printed together */
    uint64_t *structure; /* [L][L] hash of a layer range's structure and shardings */
};

static int first_of(const struct printing *printing, int range)
{
    return range == 0 ? printing->listing->first : printing->end[range - 1];
}

static uint64_t structure_of(const struct printing *printing, int range)
{
    const size_t L = (size_t)printing->listing->layers->count;
    return printing->structure[(size_t)first_of(printing, range) * L + (size_t)printing->end[range] - 1];
}

static double section_s(const struct hapt_program *program, const struct hapt_program_costs *costs,
                        enum hapt_section section)
{
    double sum = 0;
    for (int s = 0; s < program->step_count[section]; s++) {
        const struct hapt_program_step *step = &program->step[section][s];
        const bool moves = step->axis >= 0 && step->kind != HAPT_COLLECTIVE_SLICE;
        const double seconds = moves ? costs->step_s(costs->context, program, step) : 0;
        if (isfinite(seconds)) sum += seconds;
    }
    return sum;
}

static enum hapt_status print_range(const struct printing *printing, int range, int times)
{
    const struct program_listing *listing = printing->listing;
    const int first = first_of(printing, range), end = printing->end[range];
    struct hapt_program *program;
    char text[2][32];
    HAPT_TRY(hapt_program_build(listing->sharding, hapt_layers_first_op(listing->layers, first),
                                listing->layers->end_op[end - 1], printing->arena, &program));
    fprintf(printing->stream, "\nLayers [%d, %d)", first, end);
    if (times > 1) fprintf(printing->stream, ", and %d more of this kind", times - 1);
    fputs(": ", printing->stream);
    if (listing->costs)
        fprintf(printing->stream, "communication %s a microbatch, %s a step; ",
                hapt_units_time(section_s(program, listing->costs, HAPT_SECTION_FORWARD) +
                                    section_s(program, listing->costs, HAPT_SECTION_BACKWARD),
                                text[0]),
                hapt_units_time(section_s(program, listing->costs, HAPT_SECTION_REDUCE), text[1]));
    hapt_program_print(program, listing->costs, printing->stream);
    return HAPT_OK;
}

/* *before: the earlier listing of an equal range, or NULL; then the range is added to `printed`. */
static enum hapt_status was_printed(const struct printing *printing, int range, const struct program_kind **before)
{
    struct program_printed *printed = printing->printed;
    *before = NULL;
    if (!printed || printing->listing->full) return HAPT_OK;
    for (int k = 0; k < printed->count; k++)
        if (printed->kind[k].structure == structure_of(printing, range)) *before = &printed->kind[k];
    if (*before) return HAPT_OK;
    if (printed->count == printed->capacity) {
        struct program_kind *grown;
        const int capacity = printed->capacity ? 2 * printed->capacity : 32;
        HAPT_NEW(grown, printing->arena, capacity);
        if (printed->count) memcpy(grown, printed->kind, (size_t)printed->count * sizeof *grown);
        printed->kind = grown;
        printed->capacity = capacity;
    }
    printed->kind[printed->count++] = (struct program_kind){structure_of(printing, range), first_of(printing, range),
                                                            printing->end[range], printing->listing->stage};
    return HAPT_OK;
}

static enum hapt_status print_kind(const struct printing *printing, int range)
{
    const struct program_kind *before;
    int times = 1;
    for (int r = 0; r < printing->ranges && !printing->listing->full; r++) {
        if (r == range || structure_of(printing, r) != structure_of(printing, range)) continue;
        if (r < range) return HAPT_OK; /* printed with range r */
        times++;
    }
    HAPT_TRY(was_printed(printing, range, &before));
    if (!before) return print_range(printing, range, times);
    fprintf(printing->stream, "\nLayers [%d, %d)", first_of(printing, range), printing->end[range]);
    if (times > 1) fprintf(printing->stream, ", and %d more of this kind", times - 1);
    fprintf(printing->stream, ": same as layers [%d, %d) of stage %d\n", before->first, before->end, before->stage);
    return HAPT_OK;
}

enum hapt_status program_print_layers(const struct program_listing *listing, struct program_printed *printed,
                                      struct hapt_arena *arena, FILE *stream)
{
    const struct hapt_layers *layers = listing->layers;
    struct printing printing = {.listing = listing, .printed = printed, .arena = arena, .stream = stream};
    uint64_t *sharding_hash;
    HAPT_NEW(sharding_hash, arena, listing->graph->op_count);
    HAPT_NEW(printing.structure, arena, (size_t)layers->count * (size_t)layers->count);
    HAPT_NEW(printing.end, arena, layers->count + 1);
    hapt_sharding_hash(listing->sharding, sharding_hash);
    HAPT_TRY(hapt_layers_structures(layers, listing->graph, sharding_hash, printing.structure));
    for (int first = listing->first, l = listing->first; l < listing->end; l++) {
        if (!hapt_sharding_allows(listing->sharding, hapt_layers_first_op(layers, first), layers->end_op[l])) continue;
        printing.end[printing.ranges++] = l + 1;
        first = l + 1;
    }
    for (int r = 0; r < printing.ranges; r++) HAPT_TRY(print_kind(&printing, r));
    return HAPT_OK;
}
