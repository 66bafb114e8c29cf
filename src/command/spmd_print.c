/* Prints the result of hapt spmd, as text or JSON. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "program_print.h"
#include "json_print.h"
#include "spmd.h"

/* The first device after `from` with another subcluster or ratio (by more than 5e-5: printed digits). */
static int end_of_equal_ratios(const struct spmd_outcome *outcome, int from)
{
    const struct hapt_axis *axis = &outcome->result.axis;
    int j = from + 1;
    for (; j < axis->size && outcome->mesh->subcluster[j] == outcome->mesh->subcluster[from]; j++)
        for (int k = 0; k < outcome->result.segment_count; k++)
            if (fabs(axis->ratio[k * axis->size + j] - axis->ratio[k * axis->size + from]) > 5e-5) return j;
    return j;
}

static void print_ratios(const struct hapt_env *env, const struct spmd_outcome *outcome)
{
    const struct hapt_alternation_result *result = &outcome->result;
    const struct hapt_graph *graph = outcome->model->graph;
    char size[32];
    for (int k = 0; k < result->segment_count; k++) {
        const int first = k == 0 ? 0 : result->segment_end[k - 1];
        hapt_print(env, "Segment %d: %s to %s\n", k, graph->op[first].name, graph->op[result->segment_end[k] - 1].name);
    }
    hapt_print(env, "%-24s %-8s %-10s", outcome->mesh->kind == HAPT_SPMD_MACHINES ? "Machines" : "Devices", "speed",
               "memory");
    for (int k = 0; k < result->segment_count; k++) hapt_print(env, "  ratio %d ", k);
    hapt_print(env, "\n");
    double total = 0;
    for (int j = 0; j < result->axis.size; j++) total += outcome->mesh->power[j];
    for (int j = 0, end; j < result->axis.size; j = end) {
        char label[96];
        double largest_bytes = 0;
        end = end_of_equal_ratios(outcome, j);
        for (int i = j; i < end; i++) largest_bytes = fmax(largest_bytes, outcome->memory_bytes[i]);
        snprintf(label, sizeof label, "%.40s %d-%d", outcome->cluster->subcluster[outcome->mesh->subcluster[j]].name, j,
                 end - 1);
        hapt_print(env, "%-24s %-8.4f %-10s", label, outcome->mesh->power[j] / total,
                   hapt_units_bytes(largest_bytes, size));
        for (int k = 0; k < result->segment_count; k++)
            hapt_print(env, "  %.4f  ", result->axis.ratio[k * result->axis.size + j]);
        hapt_print(env, "\n");
    }
}

static void print_baselines(const struct hapt_env *env, const struct spmd_outcome *outcome)
{
    const double cost_s = outcome->result.price.cost_s * outcome->microbatches;
    char time[32], size[32];
    for (int b = 0; b < SPMD_BASELINES; b++) {
        const struct spmd_baseline *baseline = &outcome->baseline[b];
        if (!baseline->exists) {
            hapt_print(env, "%s: not possible: the rows cannot be split this way\n", baseline->name);
            continue;
        }
        hapt_print(env, "%s: %s per step, %.2f times as long; %s per device%s\n", baseline->name,
                   hapt_units_time(baseline->cost_s, time), baseline->cost_s / cost_s,
                   hapt_units_bytes(baseline->memory_bytes, size), baseline->fits ? "" : ", more than it has");
    }
}

void spmd_print(const struct hapt_env *env, const struct spmd_outcome *outcome)
{
    const struct hapt_alternation_result *result = &outcome->result;
    const double B = outcome->microbatches;
    char text[5][32];
    hapt_print(env, "%d %s as one mesh axis, %d microbatch%s of %d rows\n", outcome->mesh->size,
               outcome->mesh->kind == HAPT_SPMD_MACHINES ? "machines" : "devices", outcome->microbatches,
               B > 1 ? "es" : "", outcome->model->microbatch);
    hapt_print(env, "Collectives cost %s\n",
               outcome->mesh->collectives.measured
                   ? "as measured over as many ranks (\"collectives\" of the cluster file)"
                   : "as rings over the slowest link");
    hapt_print_wrapped(
        env, 6,
        "Step %s: computation %s, communication %s, gradients once per step %s; %d stages between synchronisations\n",
        hapt_units_time(result->price.cost_s * B, text[0]), hapt_units_time(result->price.compute_s * B, text[1]),
        hapt_units_time(result->price.communicate_s * B, text[2]), hapt_units_time(result->price.end_s * B, text[3]),
        result->price.stages);
    hapt_print(env, "From %s (%s) in %s%s%s%s\n", result->origin, result->ended,
               hapt_units_time(result->seconds, text[0]),
               result->report.optimal ? "; proven optimal at these ratios" : "", result->report.because[0] ? "; " : "",
               result->report.because);
    print_baselines(env, outcome);
    hapt_print(env, "\nIterations: best program for the ratios, then best ratios for the program\n");
    for (int t = 0; t < result->turn_count; t++) {
        const struct hapt_alternation_turn *turn = &result->turn[t];
        hapt_print_wrapped(env, 15, "  %-12s %d segment%s  program %s (found in %s)  ratios %s (%s%s%s)\n", turn->start,
                           turn->segments, turn->segments > 1 ? "s" : "", hapt_units_time(turn->program_s * B, text[0]),
                           hapt_units_time(turn->synthesis_seconds, text[1]),
                           isfinite(turn->ratios_s) ? hapt_units_time(turn->ratios_s * B, text[2]) : "infeasible",
                           hapt_units_time(turn->solve_seconds, text[3]), turn->solver ? ", by " : "",
                           turn->solver ? turn->solver : "");
    }
    hapt_print(env, "\n");
    print_ratios(env, outcome);
}

/* ---- Program ---- */

enum hapt_status spmd_print_program(const struct hapt_env *env, const struct spmd_outcome *outcome, bool full,
                                    struct hapt_arena *arena)
{
    char *text = NULL;
    size_t length;
    const struct program_listing listing = {.graph = outcome->model->graph,
                                            .layers = outcome->layers,
                                            .sharding = outcome->sharding,
                                            .end = outcome->layers->count,
                                            .full = full};
    FILE *stream = open_memstream(&text, &length);
    if (!stream) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for the text of the program");
    const enum hapt_status status = program_print_layers(&listing, NULL, arena, stream);
    fclose(stream);
    if (status == HAPT_OK) hapt_print_wrapped(env, 6, "%s", text);
    free(text);
    return status;
}

/* ---- JSON ---- */

static json_t *turns_json(const struct spmd_outcome *outcome)
{
    json_t *turns = json_array();
    for (int t = 0; t < outcome->result.turn_count; t++) {
        const struct hapt_alternation_turn *turn = &outcome->result.turn[t];
        json_array_append_new(
            turns, json_pack("{s:s, s:i, s:f, s:o, s:f, s:f, s:s?}", "start", turn->start, "segments", turn->segments,
                             "program_s", turn->program_s * outcome->microbatches, "ratios_s",
                             isfinite(turn->ratios_s) ? json_real(turn->ratios_s * outcome->microbatches) : json_null(),
                             "synthesis_seconds", turn->synthesis_seconds, "solve_seconds", turn->solve_seconds,
                             "solver", turn->solver));
    }
    return turns;
}

static json_t *segments_json(const struct spmd_outcome *outcome)
{
    const struct hapt_alternation_result *result = &outcome->result;
    json_t *segments = json_array();
    for (int k = 0; k < result->segment_count; k++) {
        json_t *ratios = json_array();
        for (int j = 0; j < result->axis.size; j++)
            json_array_append_new(ratios, json_real(result->axis.ratio[k * result->axis.size + j]));
        json_array_append_new(segments, json_pack("{s:[i, i], s:o}", "ops", k == 0 ? 0 : result->segment_end[k - 1],
                                                  result->segment_end[k], "ratios", ratios));
    }
    return segments;
}

/* Number of collectives of each kind per step. */
static json_t *collectives_json(const struct spmd_outcome *outcome)
{
    int count[HAPT_COLLECTIVE_COUNT] = {0};
    json_t *made = json_object();
    for (int i = 0; i < outcome->result.program.count; i++)
        if (outcome->result.program.instruction[i].op < 0) count[outcome->result.program.instruction[i].kind]++;
    for (int kind = HAPT_COLLECTIVE_ALL_REDUCE; kind < HAPT_COLLECTIVE_COUNT; kind++)
        json_object_set_new(made, hapt_collective_key((enum hapt_collective_kind)kind), json_integer(count[kind]));
    return made;
}

enum hapt_status spmd_print_json(const struct spmd_outcome *outcome)
{
    const struct hapt_alternation_result *result = &outcome->result;
    const double B = outcome->microbatches;
    json_t *baselines = json_object(), *memory = json_array(), *power = json_array();
    for (int b = 0; b < SPMD_BASELINES; b++) {
        const struct spmd_baseline *baseline = &outcome->baseline[b];
        json_object_set_new(baselines, baseline->name,
                            !baseline->exists
                                ? json_null()
                                : json_pack("{s:f, s:f, s:f, s:f, s:b}", "step_s", baseline->cost_s, "compute_s",
                                            baseline->compute_s, "gradients_s", baseline->end_s, "memory_bytes",
                                            baseline->memory_bytes, "fits", baseline->fits));
    }
    for (int j = 0; j < result->axis.size; j++) {
        json_array_append_new(memory, json_real(outcome->memory_bytes[j]));
        json_array_append_new(power, json_real(outcome->mesh->power[j]));
    }
    json_t *all = json_pack(
        "{s:s, s:i, s:s, s:s, s:i, s:i, s:i, s:f, s:f, s:f, s:f, s:i, s:s, s:s, s:b, s:s, s:f, s:o, s:o, s:o, s:o, "
        "s:o, s:o}",
        "format", "hapt-spmd", "version", 1, "mesh", outcome->mesh->kind == HAPT_SPMD_MACHINES ? "machines" : "devices",
        "collectives_from", outcome->mesh->collectives.measured ? "measured" : "links", "devices", outcome->mesh->size,
        "microbatches", outcome->microbatches, "rows", outcome->model->microbatch, "step_s", result->price.cost_s * B,
        "compute_s", result->price.compute_s * B, "communicate_s", result->price.communicate_s * B, "gradients_s",
        result->price.end_s * B, "stages", result->price.stages, "origin", result->origin, "ended", result->ended,
        "optimal", result->report.optimal, "because", result->report.because, "seconds", result->seconds, "turns",
        turns_json(outcome), "segments", segments_json(outcome), "baselines", baselines, "memory_bytes", memory,
        "power", power, "collectives", collectives_json(outcome));
    return hapt_json_print(all, "the program's", 1);
}
