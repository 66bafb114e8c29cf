/*
 * An interpreter of programs. All ranks of a small mesh run in lock step, with the cpu kernels and naive collectives.
 * Their shards together must be the result of one device.
 */
#ifndef HAPT_TEST_WORLD_H
#define HAPT_TEST_WORLD_H

#include "fixture.h"
#include "programs.h"
#include "shards.h"

#include "hapt/program.h"

enum { WORLD_MOST_RANKS = 16 };

struct world {
    const struct hapt_program *program; /* of position 0: the state that all ranks share */
    const struct hapt_graph *graph;     /* expanded */
    struct hapt_arena arena;
    int size[HAPT_MESH_AXES], ranks;
    struct hapt_sharding *sharding[WORLD_MOST_RANKS];
    void **data[WORLD_MOST_RANKS]; /* [rank][graph tensor] 4-byte elements */
};

static int world_place(const struct world *world, int rank, int axis)
{
    return axis == 0 ? rank / world->size[1] : rank % world->size[1];
}

static int64_t world_elements(const struct world *world, int rank, int tensor)
{
    return hapt_tensor_elements(&world->sharding[rank]->shard->tensor[tensor]);
}

/* Index in the whole tensor of every element of a rank's shard. The caller frees it. */
static int64_t *world_indices(const struct world *world, int rank, int tensor)
{
    const struct hapt_tensor *whole = &world->graph->tensor[tensor];
    const struct hapt_tensor *local = &world->sharding[rank]->shard->tensor[tensor];
    const int place[] = {world_place(world, rank, 0), world_place(world, rank, 1)};
    const int64_t count = hapt_tensor_elements(local);
    int64_t *index = calloc((size_t)count + 1, sizeof *index), *of[HAPT_MAX_DIMS];
    struct hapt_box box;
    hapt_sharding_box(world->program->sharding, tensor, place, &box);
    for (int d = 0; d < whole->dims; d++) {
        int64_t at = 0;
        CHECK(box.extent[d] == local->shape[d]);
        of[d] = calloc((size_t)local->shape[d] + 1, sizeof **of);
        for (int r = 0; r < box.runs[d]; r++)
            for (int64_t k = 0; k < box.run[d][r].count && at < local->shape[d]; k++)
                of[d][at++] = box.run[d][r].start + k;
        CHECK(at == local->shape[d]);
    }
    for (int64_t k = 0; k < count; k++) {
        int64_t rest = k, stride = 1;
        for (int d = whole->dims - 1; d >= 0; d--) {
            index[k] += of[d][rest % local->shape[d]] * stride;
            stride *= whole->shape[d];
            rest /= local->shape[d];
        }
    }
    for (int d = 0; d < whole->dims; d++) free(of[d]);
    return index;
}

__attribute__((unused)) static void world_open(struct world *world, const struct hapt_program *program)
{
    *world = (struct world){.graph = program->graph, .program = program, .size = {program->nodes, program->devices}};
    world->ranks = program->nodes * program->devices;
    CHECK(world->ranks <= WORLD_MOST_RANKS);
    hapt_arena_init(&world->arena);
    for (int r = 0; r < world->ranks; r++) {
        const int place[] = {world_place(world, r, 0), world_place(world, r, 1)};
        CHECK_OK(hapt_sharding_at(program->sharding, place, &world->arena, &world->sharding[r]));
        world->data[r] = calloc((size_t)program->graph->tensor_count, sizeof(void *));
        for (int t = 0; t < program->graph->tensor_count; t++) {
            if (program->local[t] < 0) continue;
            const size_t bytes = ((size_t)world_elements(world, r, t) * 4 + 63) / 64 * 64;
            world->data[r][t] = aligned_alloc(64, bytes);
            memset(world->data[r][t], 0, bytes);
        }
    }
}

__attribute__((unused)) static void world_close(struct world *world)
{
    for (int r = 0; r < world->ranks; r++) {
        for (int t = 0; t < world->graph->tensor_count; t++) free(world->data[r][t]);
        free(world->data[r]);
    }
    hapt_arena_release(&world->arena);
}

/* Parameters and inputs. They depend on the tensor of the source graph only, so they are the same for every mesh. */
__attribute__((unused)) static void world_feed(struct world *world, int vocab)
{
    for (int t = 0; t < world->graph->tensor_count; t++) {
        const struct hapt_tensor *tensor = &world->graph->tensor[t];
        if (world->program->local[t] < 0) continue;
        if (tensor->kind != HAPT_TENSOR_INPUT && tensor->kind != HAPT_TENSOR_PARAMETER) continue;
        uint64_t random = (uint64_t)world->program->origin[t] + 5;
        const int64_t count = hapt_tensor_elements(tensor);
        float *whole = malloc((size_t)count * 4);
        for (int64_t k = 0; k < count; k++) {
            const int32_t token = (int32_t)(hapt_random_next(&random) % (uint64_t)vocab);
            if (tensor->role == HAPT_ROLE_LOSS_SCALE)
                whole[k] = 0.125f;
            else if (tensor->kind == HAPT_TENSOR_INPUT && tensor->dtype == HAPT_I32)
                ((int32_t *)whole)[k] = tensor->role == HAPT_ROLE_TARGETS && k % 7 == 3 ? -100 : token;
            else
                whole[k] = 0.3f * (float)(2 * hapt_random_unit(&random) - 1) + (tensor->init == HAPT_INIT_ONE ? 1 : 0);
        }
        for (int r = 0; r < world->ranks; r++) {
            int64_t *index = world_indices(world, r, t);
            for (int64_t k = 0; k < world_elements(world, r, t); k++) ((float *)world->data[r][t])[k] = whole[index[k]];
            free(index);
        }
        free(whole);
    }
}

static struct hapt_view world_view(const struct world *world, int rank, int tensor)
{
    const struct hapt_tensor *local = &world->sharding[rank]->shard->tensor[tensor];
    struct hapt_view view = {.data = world->data[rank][tensor], .dtype = local->dtype, .dims = local->dims};
    memcpy(view.shape, local->shape, sizeof view.shape);
    return view;
}

/* Does the operator work on the shard of an indexed dimension? If so: its first entry and number of entries. */
static bool world_indexed(const struct world *world, const struct hapt_op *op, int rank, int64_t *first, int64_t *count)
{
    const struct hapt_signature *signature = hapt_op_signature_of(world->graph, op);
    const int place[] = {world_place(world, rank, 0), world_place(world, rank, 1)};
    for (int k = 0; k < op->input_count + op->output_count; k++) {
        const bool input = k < op->input_count;
        const int tensor = input ? op->input[k] : op->output[k - op->input_count];
        const struct hapt_signature_operand *operand =
            input ? &signature->input[k] : &signature->output[k - op->input_count];
        for (int d = 0; tensor >= 0 && d < operand->dims; d++) {
            struct hapt_box box;
            if (!operand->indexed[d]) continue;
            hapt_sharding_box(world->program->sharding, tensor, place, &box);
            if (box.extent[d] == world->graph->tensor[tensor].shape[d]) continue;
            CHECK(box.runs[d] == 1);
            *first = box.run[d][0].start;
            *count = box.extent[d];
            return true;
        }
    }
    return false;
}

static void world_compute(struct world *world, const struct hapt_program_step *step, int rank)
{
    const struct hapt_op *op = &world->sharding[rank]->shard->op[step->op];
    struct hapt_call call = {
        .input_count = op->input_count, .output_count = op->output_count, .accumulate = op->accumulate, .threads = 1};
    int64_t first = 0, count = 0;
    memcpy(call.integer, op->integer, sizeof call.integer);
    memcpy(call.real, op->real, sizeof call.real);
    for (int i = 0; i < op->input_count; i++) {
        bool here = op->input[i] >= 0;
        for (int axis = 0; axis < HAPT_MESH_AXES; axis++)
            if (step->first_rank_inputs[axis] >> i & 1u && world_place(world, rank, axis) > 0) here = false;
        if (here) call.input[i] = world_view(world, rank, op->input[i]);
    }
    for (int o = 0; o < op->output_count; o++)
        if (op->output[o] >= 0) call.output[o] = world_view(world, rank, op->output[o]);
    const bool indexed = world_indexed(world, op, rank, &first, &count);
    if (indexed) CHECK(world->sharding[rank]->first_value[step->op] == first);
    shards_run(op, &call, indexed, first, count);
}

/* The next rank after `rank` (-1: the first) with the same other coordinates, along an axis. */
static int world_next(const struct world *world, int axis, int group, int rank)
{
    for (rank++; rank < world->ranks; rank++)
        if (world_place(world, rank, 1 - axis) == group) return rank;
    return -1;
}

/* The exchange of cross-entropy on vocabulary shards. Each rank has the logsumexp of its columns, and by it the loss of
 * the targets in them. All ranks get the true values. */
static void world_exchange(struct world *world, const struct hapt_program_step *step)
{
    const struct hapt_op *op = &world->graph->op[step->op];
    const int targets = op->input[1], loss = op->output[0], lse = op->output[1], axis = step->axis;
    CHECK(strcmp(hapt_op_type_at(op->type)->name, "cross_entropy") == 0);
    for (int group = 0; group < world->size[1 - axis]; group++) {
        const int head = world_next(world, axis, group, -1);
        double total = 0;
        for (int r = head; r >= 0; r = world_next(world, axis, group, r)) total += ((float *)world->data[r][loss])[0];
        for (int64_t k = 0; k < world_elements(world, head, lse); k++) {
            double sum = 0, most = -1e30;
            for (int r = head; r >= 0; r = world_next(world, axis, group, r))
                most = fmax(most, ((float *)world->data[r][lse])[k]);
            for (int r = head; r >= 0; r = world_next(world, axis, group, r))
                sum += exp(((float *)world->data[r][lse])[k] - most);
            const double whole = most + log(sum);
            for (int r = head; r >= 0; r = world_next(world, axis, group, r)) {
                int64_t first, count;
                const int64_t target = ((int32_t *)world->data[r][targets])[k];
                CHECK(world_indexed(world, op, r, &first, &count));
                if (target >= first && target < first + count) total += whole - ((float *)world->data[r][lse])[k];
                ((float *)world->data[r][lse])[k] = (float)whole;
            }
        }
        for (int r = head; r >= 0; r = world_next(world, axis, group, r))
            ((float *)world->data[r][loss])[0] = (float)total;
    }
}

/* Any collective: concatenates or sums the shards of a group of ranks, and each rank takes its own part. */
static void world_collective(struct world *world, const struct hapt_program_step *step)
{
    const struct hapt_op *op = &world->graph->op[step->op];
    const int from = op->input[0], to = op->output[0];
    const int64_t count = hapt_tensor_elements(&world->graph->tensor[from]);
    const bool partial = world->program->sharding->property[from][step->axis].kind == HAPT_PROPERTY_PARTIAL;
    double *whole = malloc((size_t)count * sizeof *whole);
    CHECK(op->integer[0] == step->axis);
    for (int group = 0; group < world->size[1 - step->axis]; group++) {
        memset(whole, 0, (size_t)count * sizeof *whole);
        for (int r = world_next(world, step->axis, group, -1); r >= 0; r = world_next(world, step->axis, group, r)) {
            int64_t *index = world_indices(world, r, from);
            for (int64_t k = 0; k < world_elements(world, r, from); k++)
                whole[index[k]] = ((float *)world->data[r][from])[k] + (partial ? whole[index[k]] : 0);
            free(index);
        }
        for (int r = world_next(world, step->axis, group, -1); r >= 0; r = world_next(world, step->axis, group, r)) {
            int64_t *index = world_indices(world, r, to);
            for (int64_t k = 0; k < world_elements(world, r, to); k++)
                ((float *)world->data[r][to])[k] = (float)whole[index[k]];
            free(index);
        }
    }
    free(whole);
}

__attribute__((unused)) static void world_run(struct world *world, enum hapt_section section)
{
    for (int s = 0; s < world->program->step_count[section]; s++) {
        const struct hapt_program_step *step = &world->program->step[section][s];
        if (step->kind != HAPT_COLLECTIVE_NONE) {
            world_collective(world, step);
            continue;
        }
        for (int r = 0; r < world->ranks; r++) world_compute(world, step, r);
        if (step->axis >= 0) world_exchange(world, step);
    }
}

/* The tensor that all ranks hold together, in *whole [elements]. Returns the largest difference between replicas. */
static double world_gather(const struct world *world, int tensor, double *whole)
{
    const int64_t count = hapt_tensor_elements(&world->graph->tensor[tensor]);
    char *summed = calloc((size_t)count, 1);
    double apart = 0;
    memset(whole, 0, (size_t)count * sizeof *whole);
    for (int r = 0; r < world->ranks; r++) {
        const struct hapt_property *property = world->program->sharding->property[tensor];
        bool counts = true, adds = false; /* replicas of the first rank of an axis are compared, not counted */
        for (int axis = 0; axis < HAPT_MESH_AXES; axis++) {
            counts = counts && (property[axis].kind != HAPT_PROPERTY_REPLICATED || world_place(world, r, axis) == 0);
            adds = adds || property[axis].kind == HAPT_PROPERTY_PARTIAL;
        }
        int64_t *index = world_indices(world, r, tensor);
        for (int64_t k = 0; k < world_elements(world, r, tensor); k++) {
            const double value = ((float *)world->data[r][tensor])[k];
            if (counts) {
                CHECK(adds || !summed[index[k]]);
                whole[index[k]] += value;
                summed[index[k]] = 1;
            } else if (!adds) {
                apart = fmax(apart, fabs(value - whole[index[k]]));
            }
        }
        free(index);
    }
    for (int64_t k = 0; k < count; k++) CHECK(summed[k]);
    free(summed);
    return apart;
}

/* Does the tensor have its final value at the end? Gradients of activations accumulate in one of their versions.
 * Gradients of parameters are complete in the last version. */
static bool world_final(const struct world *world, int tensor, const int *versions)
{
    const struct hapt_tensor *its = &world->graph->tensor[tensor];
    const struct hapt_graph *source = world->program->sharding->source;
    if (its->kind == HAPT_TENSOR_ACTIVATION) return true;
    if (its->kind != HAPT_TENSOR_GRADIENT) return false;
    if (source->tensor[its->primal].kind == HAPT_TENSOR_PARAMETER) return tensor < source->tensor_count;
    return versions[world->program->origin[tensor]] == 1;
}

/* Largest difference of all versions from one device, relative to the largest element of each tensor. */
__attribute__((unused)) static double world_difference(const struct world *world, const struct world *one,
                                                       const char **name)
{
    const int *origin = world->program->origin;
    int *versions = calloc((size_t)world->graph->tensor_count, sizeof *versions);
    double worst = 0;
    for (int t = 0; t < world->graph->tensor_count; t++) versions[origin[t]]++;
    for (int t = 0; t < world->graph->tensor_count; t++) {
        if (world->program->local[t] < 0 || !world_final(world, t, versions)) continue;
        const int64_t count = hapt_tensor_elements(&world->graph->tensor[t]);
        double *whole = malloc((size_t)count * sizeof *whole), *expected = malloc((size_t)count * sizeof *whole);
        double apart = world_gather(world, t, whole), scale = 1e-3;
        world_gather(one, origin[t], expected);
        for (int64_t k = 0; k < count; k++) {
            apart = fmax(apart, fabs(whole[k] - expected[k]));
            scale = fmax(scale, fabs(expected[k]));
        }
        if (!(apart / scale <= worst)) worst = apart / scale, *name = world->graph->tensor[t].name;
        free(whole);
        free(expected);
    }
    free(versions);
    return worst;
}

__attribute__((unused)) static void world_run_all(struct world *world, const struct hapt_program *program, int vocab)
{
    CHECK_OK(program_check(program));
    world_open(world, program);
    world_feed(world, vocab);
    for (int section = 0; section < HAPT_SECTION_COUNT; section++) world_run(world, section);
}

/* The shards of a program together are the result of one device, apart from fp32 sums in another order. These differ by
 * up to 1e-5 of a tensor's largest element in small networks, and by `most` in gradients that cancel. */
__attribute__((unused)) static void world_compare(const struct hapt_graph *graph, int vocab,
                                                  const struct hapt_program *program, double most, const char *what)
{
    struct hapt_arena arena;
    struct hapt_program *single = NULL;
    struct world one, world;
    const char *name = "";
    hapt_arena_init(&arena);
    CHECK_OK(program_data_parallel(graph, 0, graph->forward_count, 1, 1, &arena, &single));
    if (single && program) {
        world_run_all(&one, single, vocab);
        world_run_all(&world, program, vocab);
        const double apart = world_difference(&world, &one, &name);
        CHECK_MESSAGE(apart < most, "%s: %s differs by %g", what, name, apart);
        world_close(&one);
        world_close(&world);
    }
    hapt_arena_release(&arena);
}

/* The same for the program of the whole graph, in which gradients cancel. */
__attribute__((unused)) static void world_compare_sharding(const struct hapt_graph *graph, int vocab,
                                                           const struct hapt_sharding *sharding, const char *what)
{
    struct hapt_arena arena;
    struct hapt_program *program = NULL;
    hapt_arena_init(&arena);
    CHECK_OK(hapt_program_build(sharding, 0, graph->forward_count, &arena, &program));
    world_compare(graph, vocab, program, 5e-4, what);
    hapt_arena_release(&arena);
}

/* Runs two microbatches and the end of the step with both programs, on equal inputs: every tensor of the first one has
 * the same bits on every rank. Gradients add up; WEIGHT follows each BACKWARD. Nothing overwrites a tensor but the
 * microbatch's own steps. */
__attribute__((unused)) static void world_compare_bits(const struct hapt_program *whole,
                                                       const struct hapt_program *other, int vocab, const char *what)
{
    struct world world[2];
    const struct hapt_program *program[] = {whole, other};
    for (int k = 0; k < 2; k++) {
        world_open(&world[k], program[k]);
        world_feed(&world[k], vocab);
        for (int batch = 0; batch < 2; batch++)
            for (int section = HAPT_SECTION_FORWARD; section < HAPT_SECTION_REDUCE; section++)
                world_run(&world[k], section);
        world_run(&world[k], HAPT_SECTION_REDUCE);
    }
    for (int t = 0; t < whole->graph->tensor_count; t++) {
        if (whole->local[t] < 0) continue;
        for (int r = 0; r < world[0].ranks; r++)
            CHECK_MESSAGE(
                !memcmp(world[0].data[r][t], world[1].data[r][t], (size_t)world_elements(&world[0], r, t) * 4),
                "%s: %s differs", what, whole->graph->tensor[t].name);
    }
    for (int k = 0; k < 2; k++) world_close(&world[k]);
}

#endif
