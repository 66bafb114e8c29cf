/*
 * Builds layers: finds modules (modules.c), then clusters each module's operators separately, so that equal modules
 * give equal layers (HAPT 5.1). A module is split into contiguous parts with nearly minimal largest FLOPs, at
 * boundaries that few bytes cross. If nothing repeats and one operator outweighs the rest, balanced parts do not exist.
 * A few parts are made even then, because stages can be split between layers only.
 */
#include "hapt/layers.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/ops.h"
#include "modules.h"
#include "structure.h"

/* Parts may exceed the smallest possible largest part by this share, to allow cheaper boundaries. */
#define BALANCE_SLACK 0.10
/* "As fine as balance allows": the largest part is at most this multiple of the mean part. */
#define BALANCE_LIMIT 1.2
/* Without balance: weight of boundary bytes. If all boundaries were the most expensive one, they would add this share
 * to the cost of parts with equal FLOPs. */
#define BOUNDARY_WEIGHT 0.10
enum { MAX_PARTS = 1024, FEWEST_PARTS = 8 /* of a model in which nothing repeats, if it has as many operators */ };

struct builder {
    const struct hapt_graph *graph;
    struct hapt_arena *arena;
    double *flops;          /* [forward_count + 1] prefix sums: forward and backward */
    double *boundary_bytes; /* [forward_count + 1] bytes that cross the boundary before each operator */
    int atoms;              /* runs of operators without a layer boundary inside, mostly single operators */
    int *atom;              /* [atoms + 1] first operators */
    int *atom_of;           /* [forward_count + 1] */
};

/* A run of items to split into parts: item i is operators [position[i], position[i + 1]). */
struct op_run {
    const int *position;
    int items;
};

static double run_flops(const struct builder *builder, const struct op_run *run, int first, int end)
{
    return builder->flops[run->position[end]] - builder->flops[run->position[first]];
}

/* Can the run be split into at most `parts` parts of at most `limit` FLOPs? */
static bool fits(const struct builder *builder, const struct op_run *run, int parts, double limit)
{
    int used = 1;
    for (int first = 0, item = 0; item < run->items; item++) {
        if (run_flops(builder, run, first, item + 1) <= limit) continue;
        if (first == item || ++used > parts) return false;
        first = item--;
    }
    return true;
}

/* FLOPs of the smallest possible largest part, too large only by rounding. */
static double smallest_maximum(const struct builder *builder, const struct op_run *run, int parts)
{
    double low = 0, high = run_flops(builder, run, 0, run->items);
    for (int round = 0; round < 60; round++) {
        const double middle = low + 0.5 * (high - low);
        if (fits(builder, run, parts, middle))
            high = middle;
        else
            low = middle;
    }
    return high;
}

/* Without balance, boundary bytes and the parts' squared FLOPs are added up: weight of one byte in this sum. */
static double boundary_byte_weight(const struct builder *builder, const struct op_run *run, int parts)
{
    const double total = run_flops(builder, run, 0, run->items);
    double most = 0;
    for (int item = 1; item < run->items; item++) most = fmax(most, builder->boundary_bytes[run->position[item]]);
    return parts < 2 || most == 0 ? 0 : BOUNDARY_WEIGHT * total * total / parts / (most * (parts - 1));
}

/* Splits into exactly `parts` (at most `items`) parts; end[p] is the end item of part p. Balanced: no part exceeds the
 * slack; minimises the sum of boundary bytes, then the sum of squared FLOPs. Else: minimises the weighted sum of both.
 * On a tie the first boundaries win. */
static enum hapt_status split_run(const struct builder *builder, const struct op_run *run, int parts, bool balanced,
                                  int *end)
{
    struct cost {
        double sum, squares;
        int from;
    } * table;
    const int items = run->items;
    const double limit = balanced ? (1 + BALANCE_SLACK) * smallest_maximum(builder, run, parts) : INFINITY;
    const double byte = balanced ? 1 : boundary_byte_weight(builder, run, parts);
    HAPT_NEW(table, builder->arena, (size_t)(parts + 1) * (size_t)(items + 1));
#define AT(part, item) table[(size_t)(part) * (size_t)(items + 1) + (size_t)(item)]
    for (int item = 0; item <= items; item++) AT(0, item).sum = item == 0 ? 0 : INFINITY;
    for (int part = 1; part <= parts; part++) {
        AT(part, 0).sum = INFINITY;
        for (int item = 1; item <= items; item++) {
            struct cost best = {INFINITY, INFINITY, -1};
            const double here = item == items ? 0 : byte * builder->boundary_bytes[run->position[item]];
            for (int first = item - 1; first >= part - 1; first--) {
                const double flops = run_flops(builder, run, first, item);
                if (flops > limit) break;
                const struct cost *before = &AT(part - 1, first);
                const struct cost cost = {before->sum + here + (balanced ? 0 : flops * flops),
                                          before->squares + flops * flops, first};
                const bool equal = cost.sum == best.sum;
                if (cost.sum < best.sum || (equal && cost.squares < best.squares * (1 - 1e-12))) best = cost;
            }
            AT(part, item) = best;
        }
    }
    HAPT_ASSERT(isfinite(AT(parts, items).sum));
    for (int part = parts, item = items; part > 0; part--) {
        end[part - 1] = item;
        item = AT(part, item).from;
    }
#undef AT
    return HAPT_OK;
}

static bool balances(const struct builder *builder, const struct op_run *run, int parts)
{
    return smallest_maximum(builder, run, parts) <= BALANCE_LIMIT * run_flops(builder, run, 0, run->items) / parts;
}

/* Largest number of parts, up to `wanted`, that balance allows. */
static int balanced_parts(const struct builder *builder, const struct op_run *run, int wanted)
{
    int best = 1;
    if (wanted > run->items) wanted = run->items;
    for (int parts = 2; parts <= wanted && parts <= MAX_PARTS; parts++)
        if (balances(builder, run, parts)) best = parts;
    return best;
}

static double largest_op(const struct builder *builder)
{
    double largest = 0;
    for (int op = 0; op < builder->graph->forward_count; op++)
        largest = fmax(largest, builder->flops[op + 1] - builder->flops[op]);
    return largest;
}

static enum hapt_status find_atoms(struct builder *builder)
{
    const int count = builder->graph->forward_count;
    bool *unsplittable;
    HAPT_NEW(unsplittable, builder->arena, count + 1);
    HAPT_NEW(builder->atom, builder->arena, count + 1);
    HAPT_NEW(builder->atom_of, builder->arena, count + 1);
    HAPT_TRY(hapt_structure_unsplittable(builder->graph, builder->arena, unsplittable));
    for (int op = 0; op < count; op++) {
        if (!unsplittable[op]) builder->atom[builder->atoms++] = op;
        builder->atom_of[op] = builder->atoms - 1;
    }
    builder->atom[builder->atoms] = count;
    builder->atom_of[count] = builder->atoms;
    return HAPT_OK;
}

/* Equal keys for atoms of equal structure: the index of the first atom with the same hash. */
static enum hapt_status structure_keys(const struct builder *builder, int *key, bool *heavy)
{
    uint64_t *hash;
    HAPT_NEW(hash, builder->arena, builder->atoms);
    for (int a = 0; a < builder->atoms; a++) {
        for (int op = builder->atom[a]; op < builder->atom[a + 1]; op++) {
            const uint64_t own = hapt_structure_of_op(builder->graph, op);
            hash[a] = op == builder->atom[a] ? own : hapt_hash(hash[a], &own, sizeof own);
            heavy[a] = heavy[a] || hapt_op_type_at(builder->graph->op[op].type)->heavy;
        }
        key[a] = a;
        for (int before = 0; before < a; before++) {
            if (hash[before] != hash[a]) continue;
            key[a] = key[before];
            break;
        }
    }
    return HAPT_OK;
}

static void module_run(const struct builder *builder, const struct hapt_module *module, struct op_run *run)
{
    run->position = builder->atom + builder->atom_of[module->first_op];
    run->items = builder->atom_of[module->end_op] - builder->atom_of[module->first_op];
}

/* Number of layers of a model in which nothing repeats: `granularity`. If it is 0, as many as balance allows, but at
 * least FEWEST_PARTS. */
static int parts_of_unrepeated(const struct builder *builder, const struct op_run *run, int granularity)
{
    int parts = granularity;
    if (granularity == 0) {
        const double share = run_flops(builder, run, 0, run->items) / largest_op(builder);
        parts = share < MAX_PARTS ? balanced_parts(builder, run, (int)lround(share)) : MAX_PARTS;
        if (parts < FEWEST_PARTS) parts = FEWEST_PARTS;
    }
    if (parts > MAX_PARTS) parts = MAX_PARTS;
    return parts < run->items ? parts : run->items;
}

/* Chooses the number of layers of each module. granularity 0: repeated modules as fine as balance allows, the others in
 * layers of about the same FLOPs. Else: in proportion to FLOPs. */
static void choose_parts(const struct builder *builder, const struct hapt_layers *layers, int granularity, int *parts)
{
    double unit = 0;
    const double total = builder->flops[builder->graph->forward_count];
    struct op_run run;
    for (int m = 0; m < layers->module_count; m++) {
        module_run(builder, &layers->module[m], &run);
        parts[m] = layers->module[m].kind >= 0 ? balanced_parts(builder, &run, run.items) : 1;
        if (layers->module[m].kind >= 0) unit = fmax(unit, smallest_maximum(builder, &run, parts[m]));
    }
    if (layers->module_count == 1) {
        parts[0] = parts_of_unrepeated(builder, &run, granularity);
        return;
    }
    for (int m = 0; m < layers->module_count; m++) {
        module_run(builder, &layers->module[m], &run);
        const double flops = run_flops(builder, &run, 0, run.items);
        const bool repeated = layers->module[m].kind >= 0;
        if (granularity == 0 && repeated) continue;
        const double share = granularity == 0 ? flops / unit : total > 0 ? flops * granularity / total : 1;
        const int wanted = share < 1.5 ? 1 : share > MAX_PARTS ? MAX_PARTS : (int)lround(share);
        parts[m] = repeated ? (wanted < run.items ? wanted : run.items) : balanced_parts(builder, &run, wanted);
    }
}

static enum hapt_status add_layers(const struct builder *builder, struct hapt_layers *layers, const struct op_run *run,
                                   int parts)
{
    int *end;
    HAPT_NEW(end, builder->arena, parts);
    const bool balanced = layers->module_count > 1 || balances(builder, run, parts);
    HAPT_TRY(split_run(builder, run, parts, balanced, end));
    for (int part = 0; part < parts; part++) layers->end_op[layers->count++] = run->position[end[part]];
    return HAPT_OK;
}

/* Makes layers inside modules; if fewer layers than modules are wanted, layers of complete modules. */
static enum hapt_status cluster(const struct builder *builder, int granularity, struct hapt_layers *layers)
{
    const int count = builder->graph->forward_count;
    int *parts, *start;
    HAPT_NEW(parts, builder->arena, layers->module_count);
    HAPT_NEW(start, builder->arena, layers->module_count + 1);
    if (granularity > 0 && granularity < layers->module_count) {
        for (int m = 0; m < layers->module_count; m++) start[m] = layers->module[m].first_op;
        start[layers->module_count] = count;
        return add_layers(builder, layers, &(struct op_run){start, layers->module_count}, granularity);
    }
    choose_parts(builder, layers, granularity, parts);
    for (int m = 0; m < layers->module_count; m++) {
        struct op_run run;
        module_run(builder, &layers->module[m], &run);
        HAPT_TRY(add_layers(builder, layers, &run, parts[m]));
    }
    return HAPT_OK;
}

/* Divides layers between any two heavy atoms, where fewest bytes cross; on a tie light atoms join the next heavy one.
 * The boundaries so far stay, so no plan over them is lost. */
static enum hapt_status divide_by_operator(const struct builder *builder, const bool *heavy, struct hapt_layers *layers)
{
    bool *ends; /* [atoms + 1] a layer ends before the atom */
    int last = -1;
    HAPT_NEW(ends, builder->arena, builder->atoms + 1);
    for (int l = 0; l < layers->count; l++) ends[builder->atom_of[layers->end_op[l]]] = true;
    for (int a = 0; a < builder->atoms; a++) {
        if (!heavy[a]) continue;
        bool divided = last < 0;
        int best = last + 1;
        for (int cut = last + 1; cut <= a; cut++) {
            divided = divided || ends[cut];
            if (builder->boundary_bytes[builder->atom[cut]] < builder->boundary_bytes[builder->atom[best]]) best = cut;
        }
        if (!divided) ends[best] = true;
        last = a;
    }
    layers->count = 0;
    for (int a = 1; a <= builder->atoms; a++)
        if (ends[a]) layers->end_op[layers->count++] = builder->atom[a];
    return HAPT_OK;
}

static enum hapt_status build(struct builder *builder, const struct hapt_layers_options *options,
                              struct hapt_arena *result, struct hapt_layers *layers)
{
    const int count = builder->graph->forward_count;
    int *key;
    bool *heavy;
    struct hapt_module *module;
    HAPT_NEW(key, builder->arena, count);
    HAPT_NEW(heavy, builder->arena, count);
    HAPT_NEW(builder->flops, builder->arena, count + 1);
    HAPT_NEW(builder->boundary_bytes, builder->arena, count + 1);
    hapt_structure_flops(builder->graph, builder->flops + 1);
    for (int op = 0; op < count; op++) builder->flops[op + 1] += builder->flops[op];
    HAPT_TRY(hapt_structure_boundary_bytes(builder->graph, builder->arena, builder->boundary_bytes));
    HAPT_TRY(find_atoms(builder));
    HAPT_TRY(structure_keys(builder, key, heavy));
    HAPT_TRY(hapt_modules_find(key, heavy, builder->atoms, options->heavy_minimum, builder->arena, &module,
                               &layers->module_count));
    for (int m = 0; m < layers->module_count; m++) {
        module[m].first_op = builder->atom[module[m].first_op];
        module[m].end_op = builder->atom[module[m].end_op];
    }
    HAPT_NEW(layers->module, result, layers->module_count);
    memcpy(layers->module, module, (size_t)layers->module_count * sizeof *module);
    layers->graph = builder->graph;
    HAPT_NEW(layers->end_op, result, count);
    const bool by_operator = options->granularity == HAPT_LAYERS_BY_OPERATOR;
    HAPT_TRY(cluster(builder, by_operator ? 0 : options->granularity, layers));
    if (by_operator) HAPT_TRY(divide_by_operator(builder, heavy, layers));
    HAPT_NEW(layers->module_of, result, layers->count);
    HAPT_NEW(layers->flops, result, layers->count);
    HAPT_NEW(layers->boundary_bytes, result, layers->count);
    for (int l = 0, m = 0; l < layers->count; l++) {
        const int first_op = hapt_layers_first_op(layers, l);
        while (layers->module[m].end_op <= first_op) m++;
        layers->module_of[l] = m;
        layers->flops[l] = builder->flops[layers->end_op[l]] - builder->flops[first_op];
        layers->boundary_bytes[l] = builder->boundary_bytes[layers->end_op[l]];
    }
    return HAPT_OK;
}

enum hapt_status hapt_layers_build(const struct hapt_graph *graph, const struct hapt_layers_options *options,
                                   struct hapt_arena *arena, struct hapt_layers **layers)
{
    struct hapt_layers *built;
    struct hapt_arena scratch;
    struct builder builder = {.graph = graph, .arena = &scratch};
    HAPT_ASSERT(options->granularity >= HAPT_LAYERS_BY_OPERATOR && options->heavy_minimum >= 1);
    HAPT_NEW(built, arena, 1);
    hapt_arena_init(&scratch);
    const enum hapt_status status = build(&builder, options, arena, built);
    hapt_arena_release(&scratch);
    if (status == HAPT_OK) *layers = built;
    return status;
}
