/*
 * The memory of a range. Residents and slots come from prefix sums and from lists of what crosses a boundary. The
 * workspace comes from running an allocator over the range's own operators.
 */
#include "memory_ranges.h"

struct hapt_memory_work {
    int first, end;             /* the current range */
    int first_unit, unit_end;   /* of it */
    const unsigned char *again; /* what they recompute; NULL: all */
    struct hapt_gap *gap;
    size_t *offset; /* [tensor] */
    int *dead;      /* tensors that the current operator touches last */
    /* Split shardings, by `stamp`: backward tensors that operators of the range touch in each section. */
    int *section_stamp[2];
    /* State of the current range, marked by `stamp`: tensors that leave it, and origins already handled. */
    int stamp, *leaving_stamp, *handled_stamp;
    /* Workspace activations that are also touched behind the range, and their last operator in it. */
    int outliving_count, *outliving, *outliving_op;
};

enum hapt_status hapt_memory_work_create(const struct hapt_memory_ranges *ranges, struct hapt_arena *arena,
                                         struct hapt_memory_work **work)
{
    struct hapt_memory_work *made;
    HAPT_ASSERT(!ranges->options.residents_only);
    HAPT_NEW(made, arena, 1);
    HAPT_NEW(made->gap, arena, ranges->graph->tensor_count + 1);
    HAPT_NEW(made->offset, arena, ranges->graph->tensor_count);
    HAPT_NEW(made->dead, arena, HAPT_MAX_INPUTS + HAPT_MAX_OUTPUTS);
    for (int k = 0; k < 2; k++) HAPT_NEW(made->section_stamp[k], arena, ranges->graph->tensor_count);
    HAPT_NEW(made->leaving_stamp, arena, ranges->graph->tensor_count);
    HAPT_NEW(made->handled_stamp, arena, ranges->graph->tensor_count);
    HAPT_NEW(made->outliving, arena, ranges->graph->tensor_count);
    HAPT_NEW(made->outliving_op, arena, ranges->graph->tensor_count);
    *work = made;
    return HAPT_OK;
}

static void subtract(struct amounts *sum, const struct amounts *less)
{
    sum->elements -= less->elements;
    sum->trained -= less->trained;
    sum->trained_fp32 -= less->trained_fp32;
    sum->copies -= less->copies;
    sum->slot -= less->slot;
    sum->resident -= less->resident;
    for (int g = 0; g < HAPT_PARAMETER_GROUPS; g++) sum->summed[g] -= less->summed[g];
}

/* ---- recomputation ---- */

/* True if the unit recomputes; light: what selective units repeat, too. */
static bool recomputes(const struct hapt_memory_work *work, int unit, bool light)
{
    if (unit < work->first_unit || unit >= work->unit_end) return false;
    return !work->again || work->again[unit] >= (light ? HAPT_UNIT_SELECTIVE : HAPT_UNIT_FULL);
}

/* True for a unit of the range, or -1 for none, that is selective. */
static bool is_selective(const struct hapt_memory_work *work, int unit)
{
    return unit >= 0 && work->again && work->again[unit] == HAPT_UNIT_SELECTIVE;
}

/* False for operators that would run again in a unit that is kept. */
static bool is_run(const struct hapt_memory_ranges *ranges, const struct hapt_memory_work *work, int op)
{
    const int unit = ranges_repeats(ranges, op);
    return unit < 0 || recomputes(work, unit, ranges->sharding->light[op]);
}

/* False for versions that such operators would make. */
static bool exists(const struct hapt_memory_ranges *ranges, const struct hapt_memory_work *work, int tensor)
{
    const int unit = ranges->again_unit[tensor];
    return unit < 0 || recomputes(work, unit, ranges->again_light[tensor]);
}

static void find_units(const struct hapt_memory_ranges *ranges, struct hapt_memory_work *work)
{
    const struct hapt_unit *unit = ranges->sharding->unit;
    const int count = ranges->sharding->unit_count;
    int low = 0, high = count; /* the first unit that begins in the range */
    while (low < high) {
        const int middle = low + (high - low) / 2;
        if (unit[middle].first_op < work->first)
            low = middle + 1;
        else
            high = middle;
    }
    work->first_unit = work->unit_end = low;
    while (work->unit_end < count && unit[work->unit_end].end_op <= work->end) work->unit_end++;
}

/* True if the tensor is touched (`written`: written) at a position in [first, end). */
static bool touched(const struct hapt_memory_ranges *ranges, int tensor, int first, int end, bool written)
{
    int low = ranges->touch_start[tensor], high = ranges->touch_start[tensor + 1];
    while (low < high) { /* find the first touch at `first` or behind */
        const int middle = low + (high - low) / 2;
        if (ranges->touch[middle].position < first)
            low = middle + 1;
        else
            high = middle;
    }
    for (; low < ranges->touch_start[tensor + 1] && ranges->touch[low].position < end; low++)
        if (!written || ranges->touch[low].writes) return true;
    return false;
}

/* The position whose backward operators write a gradient first. */
static int first_writer(const struct hapt_memory_ranges *ranges, int tensor)
{
    int k = ranges->touch_start[tensor + 1] - 1;
    while (k > ranges->touch_start[tensor] && !ranges->touch[k].writes) k--;
    return ranges->touch[k].position;
}

static bool comes_in(const struct hapt_memory_ranges *ranges, const struct hapt_memory_work *work, int tensor)
{
    return ranges_is_backward_tensor(ranges, tensor) && exists(ranges, work, tensor) &&
           first_writer(ranges, tensor) >= work->end && touched(ranges, tensor, work->first, work->end, false);
}

static int made_at(const struct hapt_memory_ranges *ranges, int tensor)
{
    return ranges_position_of(ranges, ranges->graph->tensor[tensor].producer);
}

/* True if backward operators of the range, or the trainer, read an activation. */
static bool is_kept(const struct hapt_memory_ranges *ranges, const struct hapt_memory_work *work, int tensor)
{
    if (ranges->kept_from[tensor] < work->end) return true;
    if (ranges->own_from[tensor] < work->end &&
        !recomputes(work, ranges->unit_of[made_at(ranges, tensor)], ranges->again_light[tensor]))
        return true;
    for (int k = ranges->again_start[tensor]; k < ranges->again_start[tensor + 1]; k++) {
        const struct again_reader *reader = &ranges->again_reader[k];
        if (reader->position < work->end && recomputes(work, reader->unit, reader->light)) return true;
    }
    return false;
}

/* The version of an activation that leaves a range ending at `end`, or -1. */
static int leaving_version(const struct hapt_memory_ranges *ranges, int origin, int end)
{
    for (int v = ranges->version_start[origin]; v < ranges->version_start[origin + 1]; v++)
        if (made_at(ranges, ranges->version[v]) < end) return ranges->sharding->storage[ranges->version[v]];
    return -1;
}

static bool in_workspace(const struct hapt_memory_ranges *ranges, int tensor, const struct hapt_memory_work *work)
{
    return ranges_is_forward_activation(ranges, tensor) && work->leaving_stamp[tensor] != work->stamp &&
           !is_kept(ranges, work, tensor);
}

/* Marks what leaves the range: one version of each origin. */
static void mark_leaving(const struct hapt_memory_ranges *ranges, int first, int end, struct hapt_memory_work *work)
{
    work->stamp++;
    for (int k = ranges->leaving_start[end]; end < ranges->positions && k < ranges->leaving_start[end + 1]; k++) {
        const int origin = ranges->leaving[k];
        if (ranges->sharding->source->tensor[origin].producer < first) continue;
        const int tensor = leaving_version(ranges, origin, end);
        if (tensor >= 0) work->leaving_stamp[tensor] = work->stamp;
    }
    for (int c = ranges->boundary_start[first]; c < ranges->boundary_start[first + 1]; c++) {
        const int tensor = ranges->boundary_tensor[c], origin = ranges->sharding->origin[tensor];
        if (!ranges_is_backward_tensor(ranges, tensor) || !exists(ranges, work, tensor)) continue;
        if (work->handled_stamp[origin] == work->stamp) continue;
        if (!touched(ranges, tensor, first, end, true)) continue;
        work->leaving_stamp[tensor] = work->handled_stamp[origin] = work->stamp;
    }
    /* Workspace versions that are also touched behind the range are freed after their last operator in it. */
    work->outliving_count = 0;
    for (int c = ranges->boundary_start[end]; end < ranges->positions && c < ranges->boundary_start[end + 1]; c++) {
        const int tensor = ranges->boundary_tensor[c];
        if (!ranges_is_forward_activation(ranges, tensor) || ranges->last_forward[tensor] < ranges->forward_start[end])
            continue;
        if (made_at(ranges, tensor) < first || !in_workspace(ranges, tensor, work)) continue;
        int last = -1;
        for (int k = ranges->touch_start[tensor];
             k < ranges->touch_start[tensor + 1] && ranges->touch[k].position < end; k++)
            if (ranges->touch[k].last_forward > last) last = ranges->touch[k].last_forward;
        work->outliving[work->outliving_count] = tensor;
        work->outliving_op[work->outliving_count++] = last;
    }
}

static size_t forward_peak(const struct hapt_memory_ranges *ranges, int first, int end, struct hapt_memory_work *work)
{
    const struct hapt_graph *graph = ranges->graph;
    const int *storage = ranges->sharding->storage;
    struct hapt_gaps gaps = {.gap = work->gap};
    for (int o = ranges->forward_start[first]; o < ranges->forward_start[end]; o++) {
        const struct hapt_op *op = &graph->op[o];
        int born[HAPT_MAX_OUTPUTS], count = 0;
        for (int k = 0; k < op->output_count; k++) {
            const int tensor = op->output[k] < 0 ? -1 : storage[op->output[k]];
            if (tensor < 0 || ranges->first_forward[tensor] != o || !in_workspace(ranges, tensor, work)) continue;
            int at = count++;
            for (; at > 0 && born[at - 1] > tensor; at--) born[at] = born[at - 1];
            born[at] = tensor;
        }
        for (int b = 0; b < count; b++) work->offset[born[b]] = hapt_gaps_take(&gaps, ranges->bytes[born[b]]);
        for (int d = ranges->death_start[o]; d < ranges->death_start[o + 1]; d++) {
            const int tensor = ranges->death[d];
            if (made_at(ranges, tensor) >= first && in_workspace(ranges, tensor, work))
                hapt_gaps_give(&gaps, work->offset[tensor], ranges->bytes[tensor]);
        }
        for (int l = 0; l < work->outliving_count; l++)
            if (work->outliving_op[l] == o)
                hapt_gaps_give(&gaps, work->offset[work->outliving[l]], ranges->bytes[work->outliving[l]]);
    }
    return gaps.end;
}

/* The backward operators of a range that run: all of an unsplit sharding, or those of one section of a split one. */
enum pass { ALL_BACKWARD, SPLIT_BACKWARD, SPLIT_WEIGHT };

static bool runs(const struct hapt_memory_ranges *ranges, enum pass pass, int op)
{
    return pass == ALL_BACKWARD || ranges->sharding->weight[op] == (pass == SPLIT_WEIGHT);
}

/* True if the memory of a backward tensor is in the workspace of the pass: both sections share weight slots only. */
static bool is_in_workspace(const struct hapt_memory_work *work, enum pass pass, int tensor)
{
    return pass == ALL_BACKWARD || work->section_stamp[pass != SPLIT_WEIGHT][tensor] != work->stamp;
}

static size_t backward_peak(const struct hapt_memory_ranges *ranges, enum pass pass, int first, int end,
                            struct hapt_memory_work *work)
{
    struct hapt_gaps gaps = {.gap = work->gap};
    const int behind = ranges->backward_start[first];
    for (int c = ranges->boundary_start[end];
         pass != SPLIT_WEIGHT && end < ranges->positions && c < ranges->boundary_start[end + 1]; c++) {
        const int tensor = ranges->boundary_tensor[c];
        if (comes_in(ranges, work, tensor) && is_in_workspace(work, pass, tensor))
            work->offset[tensor] = hapt_gaps_take(&gaps, ranges->bytes[tensor]);
    }
    for (int o = ranges->backward_start[end]; o < behind; o++) {
        int dead = 0;
        if (!runs(ranges, pass, o) || !is_run(ranges, work, o)) continue;
        for (int k = ranges->operand_start[o]; k < ranges->operand_start[o + 1]; k++) {
            const struct operand *operand = &ranges->operand[k];
            if (!is_in_workspace(work, pass, operand->tensor) || !exists(ranges, work, operand->tensor)) continue;
            if (operand->born) work->offset[operand->tensor] = hapt_gaps_take(&gaps, ranges->bytes[operand->tensor]);
            /* Gradients that are sent to earlier stages stay. */
            const int unit = ranges->again_unit[operand->tensor];
            const int next = is_selective(work, unit) ? operand->next_selective : operand->next;
            if (next == INT_MAX || (next >= behind && work->leaving_stamp[operand->tensor] != work->stamp))
                work->dead[dead++] = operand->tensor;
        }
        for (int d = 0; d < dead; d++) hapt_gaps_give(&gaps, work->offset[work->dead[d]], ranges->bytes[work->dead[d]]);
    }
    return gaps.end;
}

/* Marks which section of a split program touches each backward tensor. Incoming gradients are copied in before
 * BACKWARD. Returns the bytes that both sections touch: they are in weight slots. */
static size_t mark_sections(const struct hapt_memory_ranges *ranges, int first, int end, struct hapt_memory_work *work)
{
    size_t bytes = 0;
    for (int c = ranges->boundary_start[end]; end < ranges->positions && c < ranges->boundary_start[end + 1]; c++)
        if (comes_in(ranges, work, ranges->boundary_tensor[c]))
            work->section_stamp[0][ranges->boundary_tensor[c]] = work->stamp;
    for (int o = ranges->backward_start[end]; o < ranges->backward_start[first]; o++)
        for (int k = ranges->operand_start[o]; k < ranges->operand_start[o + 1]; k++) {
            const int tensor = ranges->operand[k].tensor, section = ranges->sharding->weight[o];
            if (!is_run(ranges, work, o) || !exists(ranges, work, tensor)) continue;
            if (work->section_stamp[section][tensor] == work->stamp) continue;
            work->section_stamp[section][tensor] = work->stamp;
            if (work->section_stamp[!section][tensor] == work->stamp) bytes += ranges->bytes[tensor];
        }
    return bytes;
}

/* The larger workspace of the two sections. */
static size_t split_peak(const struct hapt_memory_ranges *ranges, int first, int end, struct hapt_memory_work *work)
{
    const size_t backward = backward_peak(ranges, SPLIT_BACKWARD, first, end, work);
    const size_t weight = backward_peak(ranges, SPLIT_WEIGHT, first, end, work);
    return backward > weight ? backward : weight;
}

/* Bytes of one slot and of one set of transfer slots: what the backward reads, and what crosses the range's ends. */
static void add_crossings(const struct hapt_memory_ranges *ranges, int first, int end,
                          const struct hapt_memory_work *work, size_t *slot, size_t *transfer)
{
    *slot = 0;
    for (int k = ranges->made_start[first]; k < ranges->made_start[end]; k++)
        if (!in_workspace(ranges, ranges->made[k], work)) *slot += ranges->bytes[ranges->made[k]];
    for (int c = ranges->boundary_start[first]; c < ranges->boundary_start[first + 1]; c++) {
        const int tensor = ranges->boundary_tensor[c];
        if (!ranges_is_forward_activation(ranges, tensor)) {
            if (work->leaving_stamp[tensor] == work->stamp) *transfer += ranges->bytes[tensor];
            continue;
        }
        if (!touched(ranges, tensor, first, end, false)) continue;
        *transfer += ranges->bytes[tensor];
        *slot += ranges->bytes[tensor];
    }
    for (int c = ranges->boundary_start[end]; end < ranges->positions && c < ranges->boundary_start[end + 1]; c++)
        if (comes_in(ranges, work, ranges->boundary_tensor[c])) *transfer += ranges->bytes[ranges->boundary_tensor[c]];
}

static enum hapt_status scratch_bytes(const struct hapt_memory_ranges *ranges, const struct hapt_memory_work *work,
                                      size_t *bytes)
{
    const int first = work->first, end = work->end;
    struct hapt_arena arena;
    struct hapt_program *program;
    *bytes = 0;
    if (!ranges->op_scratch) return HAPT_OK;
    enum hapt_status status = HAPT_OK;
    if (!ranges->options.scratch_by_operator) {
        hapt_arena_init(&arena);
        status = hapt_program_build(ranges->sharding, first, end, &arena, &program);
        if (status == HAPT_OK) *bytes = ranges->options.scratch(ranges->options.scratch_context, program, -1);
        hapt_arena_release(&arena);
    }
    for (int o = ranges->forward_start[first]; o < ranges->forward_start[end]; o++)
        if (ranges->op_scratch[o] > *bytes) *bytes = ranges->op_scratch[o];
    for (int o = ranges->backward_start[end]; o < ranges->backward_start[first]; o++)
        if (ranges->op_scratch[o] > *bytes && is_run(ranges, work, o)) *bytes = ranges->op_scratch[o];
    for (int o = ranges->sharding->reduce_first; o < ranges->graph->op_count; o++)
        if (ranges->op_scratch[o] > *bytes &&
            touched(ranges, ranges->sharding->storage[ranges->graph->op[o].input[0]], first, end, true))
            *bytes = ranges->op_scratch[o];
    *bytes = hapt_align(*bytes);
    return status;
}

/* Elements of sharded optimizer state on this rank (hapt_parameter_group_slice). */
static size_t sharded_elements(const struct hapt_memory_ranges *ranges, const struct amounts *sum)
{
    size_t elements = sum->summed[0];
    for (unsigned g = 1; g < HAPT_PARAMETER_GROUPS; g++) {
        const struct hapt_parameter_group group = {.axes = g, .end = sum->summed[g]};
        int index;
        size_t first, end;
        hapt_parameter_group_ranks(ranges->sharding, g, &index);
        hapt_parameter_group_slice(ranges->sharding, &group, index, &first, &end);
        elements += end - first;
    }
    return elements;
}

static bool is_away(const struct hapt_memory_ranges *ranges)
{
    return ranges->options.host_state && ranges->options.state_count > 0;
}

static bool updates_on_host(const struct hapt_memory_ranges *ranges)
{
    return is_away(ranges) && ranges->options.host_update;
}

/* hapt_memory_plan */
static bool masters_unread(const struct amounts *sum)
{
    return sum->trained > 0 && sum->copies > 0 && sum->trained_fp32 == 0;
}

/* Blocks of the state that a rank has for what it updates: states, and masters that are laid out like one. */
static int state_blocks(const struct hapt_memory_ranges *ranges, const struct amounts *sum, bool sharded)
{
    return ranges->options.state_count +
           ((masters_unread(sum) && (sharded || is_away(ranges))) || sum->away || sum->shared);
}

/* Bytes of what the host has, for a state of so many elements. */
static size_t state_bytes(const struct hapt_memory_ranges *ranges, const struct amounts *sum, size_t elements)
{
    if (!is_away(ranges)) return 0;
    const int blocks = state_blocks(ranges, sum, false);
    const bool masters = blocks == ranges->options.state_count; /* on the device */
    size_t bytes = (size_t)(blocks + sum->gradients_away) * hapt_align(elements * sizeof(float)) +
                   (sum->away && sum->copies ? hapt_align(elements * sizeof(uint16_t)) : 0);
    for (int w = HAPT_WINDOW_GRADIENTS; w <= HAPT_WINDOW_COPIES && updates_on_host(ranges); w++)
        bytes += hapt_align(hapt_host_window_bytes((enum hapt_host_window)w, hapt_memory_window(elements),
                                                   !sum->gradients_away, masters, sum->copies > 0 && !sum->away));
    return bytes;
}

static struct amounts sum_amounts(const struct hapt_memory_ranges *ranges, int first_op, int end_op);

static size_t weight_size(const struct amounts *sum)
{
    return sum->copies ? sizeof(uint16_t) : sizeof(float);
}

/* Elements of one place for the weights of a unit: the largest unit's, as far as the range has it. *units: those with
 * weights. */
static size_t place_elements(const struct hapt_memory_ranges *ranges, int first_op, int end_op, int *units)
{
    size_t most = 0;
    *units = 0;
    for (int u = 0; u < ranges->options.weight_unit_count; u++) {
        const struct hapt_unit *unit = &ranges->options.weight_unit[u];
        const int first = unit->first_op > first_op ? unit->first_op : first_op,
                  end = unit->end_op < end_op ? unit->end_op : end_op;
        if (first >= end) continue;
        const size_t elements = sum_amounts(ranges, first, end).trained;
        if (elements > most) most = elements;
        *units += elements > 0;
    }
    return most;
}

/* Resident bytes of the blocks: weights, their copies, gradients, optimizer state of `state_elements`. */
static size_t block_bytes(const struct hapt_memory_ranges *ranges, const struct amounts *sum, size_t state_elements,
                          bool sharded)
{
    const int blocks = state_blocks(ranges, sum, sharded);
    const size_t masters = blocks > ranges->options.state_count ? sum->elements - sum->trained : sum->elements;
    const size_t here = updates_on_host(ranges) ? 0
                        : is_away(ranges)       ? hapt_memory_window(state_elements)
                                                : state_elements,
                 copies = sum->away     ? here
                          : sum->shared ? state_elements
                                        : sum->elements;
    return hapt_align(masters * sizeof(float)) + (sum->copies ? hapt_align(copies * sizeof(uint16_t)) : 0) +
           (sum->gradients_away ? 0 : hapt_align(sum->trained * sizeof(float))) +
           (size_t)blocks * hapt_align(here * sizeof(float));
}

static struct amounts sum_amounts(const struct hapt_memory_ranges *ranges, int first_op, int end_op)
{
    HAPT_ASSERT(first_op >= 0 && first_op < end_op && end_op <= ranges->positions);
    struct amounts sum = ranges->prefix[end_op];
    subtract(&sum, &ranges->prefix[first_op]);
    for (int r = 0; r < ranges->repeat_count; r++)
        if (ranges->repeat[r].before >= first_op && ranges->repeat[r].position < end_op)
            subtract(&sum, &ranges->repeat[r].amounts);
    return sum;
}

/* True if kernels read the weights of these operators in places: they lie in units for which that is asked. */
static bool weights_move(const struct hapt_memory_ranges *ranges, int first_op, int end_op, const struct amounts *sum)
{
    const struct hapt_memory_options *options = &ranges->options;
    if (sum->trained == 0 || sum->elements != sum->trained || (sum->copies > 0 && sum->trained_fp32 > 0)) return false;
    for (int u = 0; u < options->weight_unit_count; u++)
        if (options->weight_unit[u].first_op < end_op && options->weight_unit[u].end_op > first_op) return true;
    return false;
}

/* True if the gradients of these weights on the host are there, too: no other rank and no operator outside has a part
 * in them. */
static bool gradients_away(const struct hapt_memory_ranges *ranges, int first_op, int end_op)
{
    const struct hapt_memory_options *options = &ranges->options;
    bool asked = false;
    if (!options->host_update || ranges->sharding->axis[0].size * ranges->sharding->axis[1].size > 1) return false;
    for (int u = 0; u < options->gradient_unit_count; u++)
        asked |= options->gradient_unit[u].first_op < end_op && options->gradient_unit[u].end_op > first_op;
    for (int r = 0; r < ranges->repeat_count && asked; r++) {
        const struct repeat *repeat = &ranges->repeat[r];
        const bool before = repeat->before >= first_op && repeat->before < end_op,
                   behind = repeat->position >= first_op && repeat->position < end_op;
        if (repeat->amounts.trained > 0 && before != behind) return false;
    }
    return asked;
}

/* True if ranks sum some of these gradients. */
static bool shares_gradients(const struct hapt_memory_ranges *ranges, const struct amounts *sum)
{
    int index;
    for (unsigned g = 1; g < HAPT_PARAMETER_GROUPS; g++)
        if (sum->summed[g] > 0 && hapt_parameter_group_ranks(ranges->sharding, g, &index) > 1) return true;
    return false;
}

static struct amounts range_amounts(const struct hapt_memory_ranges *ranges, int first_op, int end_op)
{
    struct amounts sum = sum_amounts(ranges, first_op, end_op);
    const bool move = weights_move(ranges, first_op, end_op, &sum), sharded = ranges->options.sharded_state;
    sum.away = move && is_away(ranges) && !sharded;
    sum.shared = move && sharded && (sum.copies > 0 || !is_away(ranges)) && shares_gradients(ranges, &sum);
    sum.gradients_away = sum.away && gradients_away(ranges, first_op, end_op);
    return sum;
}

/* Bytes of the places for weights, and for their gradients. */
static size_t places_bytes(const struct hapt_memory_ranges *ranges, int first_op, int end_op, const struct amounts *sum)
{
    int units;
    if (!sum->away && !sum->shared) return 0;
    const size_t most = place_elements(ranges, first_op, end_op, &units);
    return HAPT_WEIGHT_PLACES * hapt_align(most * weight_size(sum)) +
           (sum->gradients_away ? HAPT_GRADIENT_PLACES * hapt_align(most * sizeof(float)) : 0);
}

/* Resident bytes of operators [first_op, end_op) with whole and with sharded optimizer state. */
static void resident_bytes(const struct hapt_memory_ranges *ranges, int first_op, int end_op, const struct amounts *sum,
                           size_t sharded_count, size_t *whole, size_t *sharded)
{
    const size_t places = places_bytes(ranges, first_op, end_op, sum);
    *sharded = sum->resident + places +
               block_bytes(ranges, sum, sum->away ? sum->trained : sharded_count, !sum->away); /* never sharded */
    *whole = ranges->options.sharded_state ? *sharded
                                           : sum->resident + places + block_bytes(ranges, sum, sum->trained, false);
}

void hapt_memory_ranges_least(const struct hapt_memory_ranges *ranges, int first_op, int end_op,
                              struct hapt_memory_bytes *bytes)
{
    const struct amounts sum = range_amounts(ranges, first_op, end_op);
    *bytes = (struct hapt_memory_bytes){
        .trained_elements = sum.trained, .copies = sum.copies > 0, .masters_unread = masters_unread(&sum)};
    resident_bytes(ranges, first_op, end_op, &sum, sharded_elements(ranges, &sum), &bytes->parameter_bytes,
                   &bytes->sharded_bytes);
}

static void add_fetches(const struct hapt_memory_ranges *ranges, int first_op, int end_op, const struct amounts *sum,
                        struct memory_walk *walk)
{
    int units;
    const size_t most = place_elements(ranges, first_op, end_op, &units);
    walk->weight_bytes = sum->trained * weight_size(sum);
    walk->weight_units = units;
    walk->fetch_bytes =
        units > HAPT_WEIGHT_PLACES ? walk->weight_bytes / (size_t)units * (size_t)(units - HAPT_WEIGHT_PLACES) : 0;
    if (!sum->gradients_away) return;
    /* Backward passes run in the same order. Those whose place another unit takes are fetched, both of them. */
    const int taken = units > HAPT_GRADIENT_PLACES ? 2 * (units - HAPT_GRADIENT_PLACES) : 0;
    walk->gradient_bytes = sum->trained * sizeof(float);
    walk->gradient_fetch_bytes =
        taken < units ? walk->gradient_bytes / (size_t)units * (size_t)taken : walk->gradient_bytes;
    walk->gradient_last_bytes = most * sizeof(float);
}

/* All but kernel scratch. `unsplit`: as of hapt_memory_ranges_activations. */
static void walk_activations(const struct hapt_memory_ranges *ranges, int first_op, int end_op,
                             const unsigned char *again, const struct hapt_memory_activations *unsplit,
                             struct hapt_memory_work *work, struct hapt_memory_activations *activations)
{
    work->first = first_op;
    work->end = end_op;
    work->again = again;
    find_units(ranges, work);
    mark_leaving(ranges, first_op, end_op, work);
    *activations = (struct hapt_memory_activations){0};
    if (unsplit) {
        *activations = *unsplit;
    } else {
        add_crossings(ranges, first_op, end_op, work, &activations->slot_bytes, &activations->transfer_bytes);
        activations->slot_bytes += sum_amounts(ranges, first_op, end_op).slot;
        activations->forward_bytes = forward_peak(ranges, first_op, end_op, work);
    }
    if (ranges->sharding->split) {
        activations->weight_slot_bytes = mark_sections(ranges, first_op, end_op, work);
        activations->backward_bytes = split_peak(ranges, first_op, end_op, work);
    } else {
        activations->backward_bytes = backward_peak(ranges, ALL_BACKWARD, first_op, end_op, work);
    }
}

/* All but activations. */
static void walk_residents(const struct hapt_memory_ranges *ranges, int first_op, int end_op, struct memory_walk *walk)
{
    const struct amounts sum = range_amounts(ranges, first_op, end_op);
    *walk = (struct memory_walk){.trained_elements = sum.trained,
                                 .copies = sum.copies > 0,
                                 .masters_unread = masters_unread(&sum),
                                 .host_weights = sum.away,
                                 .host_gradients = sum.gradients_away,
                                 .sharded_weights = sum.shared};
    const size_t sharded = sharded_elements(ranges, &sum);
    if (walk->host_weights || walk->sharded_weights) add_fetches(ranges, first_op, end_op, &sum, walk);
    resident_bytes(ranges, first_op, end_op, &sum, sharded, &walk->resident_bytes, &walk->sharded_bytes);
    if (!ranges->options.host_state) return;
    walk->sharded_host_bytes = state_bytes(ranges, &sum, walk->host_weights ? sum.trained : sharded);
    walk->host_bytes =
        ranges->options.sharded_state ? walk->sharded_host_bytes : state_bytes(ranges, &sum, sum.trained);
}

void memory_walk(const struct hapt_memory_ranges *ranges, int first_op, int end_op, const unsigned char *again,
                 struct hapt_memory_work *work, struct memory_walk *walk)
{
    walk_residents(ranges, first_op, end_op, walk);
    walk_activations(ranges, first_op, end_op, again, NULL, work, &walk->activations);
}

enum hapt_region memory_walk_region(const struct hapt_memory_ranges *ranges, const struct hapt_memory_work *work,
                                    int tensor, size_t *offset)
{
    const struct hapt_tensor *of = &ranges->graph->tensor[tensor];
    if (of->kind == HAPT_TENSOR_INPUT) return hapt_role_is_scalar(of->role) ? HAPT_REGION_RESIDENT : HAPT_REGION_SLOT;
    if (ranges_is_forward_activation(ranges, tensor)) {
        if (made_at(ranges, tensor) < work->first || !in_workspace(ranges, tensor, work)) return HAPT_REGION_SLOT;
    } else if (!ranges_is_backward_tensor(ranges, tensor)) {
        return HAPT_REGION_RESIDENT;
    } else if (ranges->sharding->split && work->section_stamp[0][tensor] == work->stamp &&
               work->section_stamp[1][tensor] == work->stamp) {
        return HAPT_REGION_WEIGHT_SLOT;
    }
    *offset = work->offset[tensor];
    return HAPT_REGION_WORKSPACE;
}

enum hapt_status hapt_memory_ranges_activations(const struct hapt_memory_ranges *ranges, int first_op, int end_op,
                                                const unsigned char *again,
                                                const struct hapt_memory_activations *unsplit,
                                                struct hapt_memory_work *work,
                                                struct hapt_memory_activations *activations)
{
    walk_activations(ranges, first_op, end_op, again, unsplit, work, activations);
    return unsplit ? HAPT_OK : scratch_bytes(ranges, work, &activations->scratch_bytes);
}

void hapt_memory_ranges_add(const struct hapt_memory_ranges *ranges, int first_op, int end_op,
                            const struct hapt_memory_activations *activations, struct hapt_memory_bytes *figures)
{
    struct memory_walk walk;
    walk_residents(ranges, first_op, end_op, &walk);
    const int slots = ranges->options.transfer_slots > 0 ? ranges->options.transfer_slots : HAPT_TRANSFER_SLOTS;
    const size_t rest =
        memory_workspace_bytes(activations) + activations->scratch_bytes + (size_t)slots * activations->transfer_bytes;
    *figures = (struct hapt_memory_bytes){.parameter_bytes = rest + walk.resident_bytes,
                                          .sharded_bytes = rest + walk.sharded_bytes,
                                          .activation_bytes = activations->slot_bytes,
                                          .weight_slot_bytes = activations->weight_slot_bytes,
                                          .host_bytes = walk.host_bytes,
                                          .sharded_host_bytes = walk.sharded_host_bytes,
                                          .trained_elements = walk.trained_elements,
                                          .weight_bytes = walk.weight_bytes,
                                          .fetch_bytes = walk.fetch_bytes,
                                          .weight_units = walk.weight_units,
                                          .gradient_bytes = walk.gradient_bytes,
                                          .gradient_fetch_bytes = walk.gradient_fetch_bytes,
                                          .gradient_last_bytes = walk.gradient_last_bytes,
                                          .copies = walk.copies,
                                          .masters_unread = walk.masters_unread};
}

enum hapt_status hapt_memory_ranges_of(const struct hapt_memory_ranges *ranges, int first_op, int end_op,
                                       const unsigned char *again, struct hapt_memory_work *work,
                                       struct hapt_memory_bytes *figures)
{
    struct hapt_memory_activations activations;
    HAPT_TRY(hapt_memory_ranges_activations(ranges, first_op, end_op, again, NULL, work, &activations));
    hapt_memory_ranges_add(ranges, first_op, end_op, &activations, figures);
    return HAPT_OK;
}
