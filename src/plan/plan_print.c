/* Prints a plan as text and as JSON. */
#include <jansson.h>
#include <stdio.h>

#include "hapt/plan.h"

/* Messages that pass stages over; the table has those between neighbours. */
static void print_far_messages(const struct hapt_env *env, const struct hapt_plan *plan)
{
    enum { SHOWN = 8 };
    int count = 0;
    for (int e = 0; e < plan->edge_count; e++) {
        const struct hapt_schedule_edge *edge = &plan->edge[e].edge;
        char bytes[32];
        if (edge->backward || edge->to == edge->from + 1 || count++ >= SHOWN) continue;
        hapt_print(env, "%s %d to %d (%s)", count == 1 ? "  past the next stage:" : ",", edge->from, edge->to,
                   hapt_units_bytes(plan->edge[e].bytes, bytes));
    }
    if (count > SHOWN) hapt_print(env, ", and %d more", count - SHOWN);
    if (plan->transfer_slots > 0 && !hapt_schedule_loops(plan->schedule))
        hapt_print(env, "; %d transfer slots", plan->transfer_slots);
    if (count > 0) hapt_print(env, "\n");
}

/* "2 loops over 4 submeshes, B_l 8, prefetch 2" */
static void print_loops(const struct hapt_env *env, const struct hapt_plan *plan)
{
    hapt_print(env, "  %d loops over %d submeshes%s, %d microbatches a group, prefetch %d, %d transfer slots\n",
               hapt_plan_loops(plan), plan->submesh_count, hapt_plan_is_v(plan) ? " as a V" : "",
               hapt_schedule_loop_batch(plan->schedule, plan->microbatches, plan->submesh_count, plan->loop_batch),
               plan->prefetch, hapt_plan_transfer_slots(plan));
    for (int s = 0; s < plan->submesh_count; s++) {
        const struct hapt_plan_submesh *submesh = &plan->submesh[s];
        char need[32], have[32], stages[64] = "";
        double have_bytes = 0;
        const double bytes = hapt_plan_submesh_bytes(plan, submesh, &have_bytes);
        int length = 0;
        for (int i = 0; i < plan->stage_count && length < (int)sizeof stages - 8; i++)
            if (plan->stage[i].submesh == submesh)
                length += snprintf(stages + length, sizeof stages - (size_t)length, "%s%d", length > 0 ? ", " : "", i);
        hapt_print(env, "  submesh %d (%s): stages %s, %d slots, %s of %s\n", s, submesh->name, stages, submesh->slots,
                   hapt_units_bytes(bytes, need), hapt_units_bytes(have_bytes, have));
    }
}

/* A sentence that ends in numbers, one per stage; wrapped. */
struct numbers {
    char text[4000];
    size_t length;
};

static void add_number(struct numbers *numbers, int value)
{
    const size_t room = sizeof numbers->text - numbers->length;
    if (room > 16) numbers->length += (size_t)snprintf(numbers->text + numbers->length, room, " %d", value);
}

static void print_numbers(const struct hapt_env *env, const char *what, const struct numbers *numbers)
{
    hapt_print_wrapped(env, 6, "  %s:%s%s\n", what, numbers->text,
                       numbers->length + 16 >= sizeof numbers->text ? " ..." : "");
}

static int units_of(const struct hapt_layout *layout, bool selective)
{
    const int light = hapt_layout_selective_units(layout);
    return selective ? light : layout->unit_count - light;
}

static void print_units(const struct hapt_env *env, const struct hapt_plan *plan)
{
    for (int selective = 0; selective < 2; selective++) {
        int units = 0;
        for (int i = 0; i < plan->stage_count; i++) units += units_of(&plan->stage[i].layout, selective);
        if (units == 0) continue;
        struct numbers numbers = {.length = 0};
        for (int i = 0; i < plan->stage_count; i++) add_number(&numbers, units_of(&plan->stage[i].layout, selective));
        print_numbers(env,
                      selective ? "blocks that recompute light operators in the backward pass, by stage"
                                : "blocks that recompute their activations in the backward pass, by stage",
                      &numbers);
    }
}

/* The stages whose weights are at one of two places. */
static void print_weights_at(const struct hapt_env *env, const struct hapt_plan *plan, const char *what, int one,
                             int two)
{
    struct numbers numbers = {.length = 0};
    for (int i = 0; i < plan->stage_count; i++) {
        const int at = plan->stage[i].layout.weights_at;
        if (at == one || at == two) add_number(&numbers, i);
    }
    if (numbers.length > 0) print_numbers(env, what, &numbers);
}

/* Split backward passes. */
static void print_weight_slots(const struct hapt_env *env, const struct hapt_plan *plan)
{
    struct numbers numbers = {.length = 0};
    for (int i = 0; i < plan->stage_count; i++) add_number(&numbers, plan->stage[i].weight_slots);
    print_numbers(env, "gradients of parameters wait for idle times; microbatches that may wait, by stage", &numbers);
}

static void print_away(const struct hapt_env *env, const struct hapt_plan *plan)
{
    print_weights_at(env, plan, "weights on the hosts, which passes fetch block by block, of stages",
                     HAPT_WEIGHTS_ON_HOST, HAPT_GRADIENTS_ON_HOST);
    print_weights_at(env, plan,
                     "gradients on the hosts, which backward passes fetch and return block by block, of stages",
                     HAPT_GRADIENTS_ON_HOST, HAPT_GRADIENTS_ON_HOST);
    print_weights_at(env, plan, "sharded weights, which passes gather block by block, of stages", HAPT_WEIGHTS_SHARDED,
                     HAPT_WEIGHTS_SHARDED);
}

void hapt_plan_print(const struct hapt_env *env, const struct hapt_plan *plan)
{
    char time[6][32], bytes[2][32];
    const double mfu = hapt_plan_mfu(plan);
    char rows[32] = "";
    if (plan->rows > 0) snprintf(rows, sizeof rows, " of %d row%s", plan->rows, plan->rows > 1 ? "s" : "");
    hapt_print_wrapped(env, 6, "plan: %d stage%s, %d microbatch%s%s, schedule %s%s%s%s%s%s\n", plan->stage_count,
                       plan->stage_count > 1 ? "s" : "", plan->microbatches, plan->microbatches > 1 ? "es" : "", rows,
                       hapt_schedule_kind_name(plan->schedule), plan->blocking ? " without overlap" : "",
                       plan->split ? ", split backward" : "", plan->precision != HAPT_PRECISION_UNKNOWN ? ", " : "",
                       plan->precision != HAPT_PRECISION_UNKNOWN ? hapt_precision_name(plan->precision) : "",
                       plan->profile == HAPT_PROFILE_PREDICTED ? "; times are predicted, not measured" : "");
    hapt_print(env, "  %5s  %-9s  %-12s  %9s  %10s  %10s  %8s  %-21s\n", "stage", "layers", "subcluster", "submesh",
               "compute", "transfer", "launches", "memory of device");
    for (int i = 0; i < plan->stage_count; i++) {
        const struct hapt_plan_stage *stage = &plan->stage[i];
        char layers[32], submesh[64], memory[80];
        snprintf(layers, sizeof layers, "%d-%d", stage->first_layer, stage->end_layer);
        snprintf(memory, sizeof memory, "%s of %s", hapt_units_bytes(stage->memory_bytes, bytes[0]),
                 hapt_units_bytes(stage->device_memory_bytes, bytes[1]));
        hapt_print(env, "  %5d  %-9s  %-12s  %9s  %10s  %10s  %8d  %-21s\n", i, layers, stage->submesh->name,
                   hapt_plan_stage_submesh(stage, submesh), hapt_units_time(stage->compute_s, time[0]),
                   i == plan->stage_count - 1 ? "-" : hapt_units_time(stage->comm_s, time[1]), stage->warmup, memory);
    }
    if (plan->split) {
        print_weight_slots(env, plan);
    }
    if (plan->host_state)
        hapt_print(env, "  the optimizer state is on the hosts; %s%s\n",
                   plan->host_update ? "they update the parameters, part by part" : "the update copies it part by part",
                   hapt_plan_defers(plan) ? ", during the next forward pass" : "");
    print_away(env, plan);
    print_units(env, plan);
    if (plan->exchange_s > 0 && plan->exchange_bytes > 0)
        hapt_print(env, "  exchange of tied gradients at the end of the step: %s in each direction as %s, %s\n",
                   hapt_units_bytes(plan->exchange_bytes, bytes[0]), hapt_tied_exchange_name(plan->exchange),
                   hapt_units_time(plan->exchange_s, time[0]));
    print_far_messages(env, plan);
    if (hapt_schedule_loops(plan->schedule)) print_loops(env, plan);
    hapt_print(env, "  simulated step %s", hapt_units_time(plan->simulated_s, time[3]));
    if (plan->bound_s > 0 && plan->bound_s < plan->simulated_s)
        hapt_print(env, ", proven within %.2g %% of the least possible %s",
                   100 * (plan->simulated_s / plan->bound_s - 1), hapt_units_time(plan->bound_s, time[0]));
    else if (plan->bound_s > 0)
        hapt_print(env, ", proven the least");
    hapt_print_wrapped(env, 4, "\n  HAPT (13): %s, t_max %s per microbatch set by %s, balance %.1f %%\n",
                       hapt_units_time(plan->latency_s, time[2]), hapt_units_time(plan->t_max_s, time[4]), plan->limit,
                       100 * plan->balance_eta);
    if (mfu > 0) hapt_print(env, "  model FLOPs utilisation %.1f %%\n", 100 * mfu);
    if (plan->search.candidates > 0)
        hapt_print(env, "  searched in %s: %lld of %lld t_max values priced",
                   hapt_units_time(plan->search.seconds, time[5]), (long long)plan->search.evaluated,
                   (long long)plan->search.candidates);
    if (plan->search.candidates > 0 && plan->search.gap > 0)
        hapt_print(env, "; no plan takes less than %s: proven within %.3g %% of the optimum",
                   hapt_units_time(plan->latency_s / (1 + plan->search.gap), time[0]), 100 * plan->search.gap);
    if (plan->search.candidates > 0) hapt_print(env, "\n");
}

/* Device counts per subcluster, and each device's share of the work (null: unknown). */
static json_t *mixed_object(const struct hapt_plan_submesh *submesh, const double *ratio)
{
    json_t *devices = json_array(), *ratios = ratio ? json_array() : json_null();
    for (int k = 0, d = 0; k < submesh->part_count; k++) {
        json_array_append_new(
            devices, json_pack("{s:s, s:i}", "subcluster", submesh->part_name[k], "count", submesh->devices[k]));
        for (int n = 0; ratio && n < submesh->devices[k]; n++) json_array_append_new(ratios, json_real(ratio[d++]));
    }
    return json_pack("{s:o, s:o}", "devices", devices, "ratios", ratios);
}

static json_t *stage_object(const struct hapt_plan *plan, const struct hapt_plan_stage *stage)
{
    const struct hapt_plan_submesh *submesh = stage->submesh;
    const struct hapt_layout *layout = &stage->layout;
    json_t *object =
        hapt_plan_is_mixed(stage)
            ? mixed_object(submesh, layout->ratio)
            : json_pack("{s:s, s:i, s:i, s:i}", "subcluster", submesh->name, "nodes", submesh->nodes,
                        "devices_per_node", submesh->devices_per_node, "tensor_parallel", layout->tensor_parallel);
    json_object_set_new(object, "program",
                        json_string(layout->program                      ? layout->program->name
                                    : layout->kind == HAPT_LAYOUT_TENSOR ? "tensor"
                                                                         : "data"));
    json_t *all = json_pack("{s:[ii]}", "layers", stage->first_layer, stage->end_layer);
    json_t *figures = json_pack("{s:f, s:f, s:i, s:f}", "compute_s", stage->compute_s, "comm_s", stage->comm_s,
                                "warmup", stage->warmup, "memory_bytes", stage->memory_bytes);
    if (json_object_update(all, object) != 0 || json_object_update(all, figures) != 0) {
        json_decref(all);
        all = NULL;
    }
    if (all && plan->split) {
        json_object_set_new(all, "weight_s", json_real(stage->weight_s));
        json_object_set_new(all, "slots", json_integer(hapt_plan_stage_slots(stage)));
        json_object_set_new(all, "weight_slots", json_integer(stage->weight_slots));
    }
    if (all && hapt_plan_defers(plan)) json_object_set_new(all, "deferred_s", json_real(stage->deferred_s));
    json_decref(object);
    json_decref(figures);
    if (all && plan->submesh_count < plan->stage_count)
        json_object_set_new(all, "submesh", json_integer(stage->submesh - plan->submesh));
    if (all && stage->forward_only) json_object_set_new(all, "forward_only", json_true());
    if (all && hapt_weights_on_host(layout->weights_at)) json_object_set_new(all, "host_weights", json_true());
    if (all && layout->weights_at == HAPT_WEIGHTS_SHARDED) json_object_set_new(all, "sharded_weights", json_true());
    if (all && layout->weights_at == HAPT_GRADIENTS_ON_HOST) json_object_set_new(all, "host_gradients", json_true());
    if (all && layout->recompute > 0) {
        json_object_set_new(all, "recomputed_units", json_integer(layout->unit_count));
        json_object_set_new(all, "selective_units", json_integer(units_of(layout, true)));
    }
    return all;
}

struct json_t *hapt_plan_stages_json(const struct hapt_plan *plan)
{
    json_t *stages = json_array();
    for (int i = 0; stages && i < plan->stage_count; i++)
        json_array_append_new(stages, stage_object(plan, &plan->stage[i]));
    return stages;
}

static json_t *messages_json(const struct hapt_plan *plan)
{
    json_t *messages = json_array();
    for (int e = 0; messages && e < plan->edge_count; e++) {
        const struct hapt_plan_edge *at = &plan->edge[e];
        json_array_append_new(messages, json_pack("{s:i, s:i, s:f, s:f, s:f}", "from", at->edge.from, "to", at->edge.to,
                                                  "bytes", at->bytes, "time_s", at->time_s, "share", at->share));
    }
    return messages;
}

struct json_t *hapt_plan_json(const struct hapt_plan *plan)
{
    const double mfu = hapt_plan_mfu(plan);
    json_t *object =
        json_pack("{s:s, s:i, s:i, s:s, s:b, s:f, s:f, s:f, s:f, s:s, s:o, s:{s:f, s:I, s:I, s:f}, s:o}", "format",
                  "hapt-plan", "version", 1, "microbatches", plan->microbatches, "schedule",
                  hapt_schedule_kind_name(plan->schedule), "blocking", plan->blocking, "latency_s", plan->latency_s,
                  "simulated_s", plan->simulated_s, "t_max_s", plan->t_max_s, "balance_eta", plan->balance_eta, "limit",
                  plan->limit, "mfu", mfu > 0 ? json_real(mfu) : json_null(), "search", "seconds", plan->search.seconds,
                  "candidates", (json_int_t)plan->search.candidates, "evaluated", (json_int_t)plan->search.evaluated,
                  "gap", plan->search.gap, "stages", hapt_plan_stages_json(plan));
    if (object && plan->host_state)
        json_object_set_new(object, "offload", json_string(plan->host_update ? "update" : "optimizer"));
    if (object && plan->precision != HAPT_PRECISION_UNKNOWN) {
        json_object_set_new(object, "precision", json_string(hapt_precision_name(plan->precision)));
        json_object_set_new(object, "boundary_dtype",
                            json_string(hapt_dtype_name(hapt_precision_dtype(plan->precision))));
    }
    if (object && plan->split) json_object_set_new(object, "split_backward", json_true());
    if (object && hapt_schedule_loops(plan->schedule))
        json_object_set_new(object, "loops",
                            json_pack("{s:i, s:s, s:i, s:i, s:i}", "loops", hapt_plan_loops(plan), "placement",
                                      hapt_plan_is_v(plan) ? "v" : "loop", "loop_batch",
                                      hapt_schedule_loop_batch(plan->schedule, plan->microbatches, plan->submesh_count,
                                                               plan->loop_batch),
                                      "prefetch", plan->prefetch, "transfer_slots", hapt_plan_transfer_slots(plan)));
    if (object && plan->bound_s > 0) {
        json_object_set_new(object, "bound_s", json_real(plan->bound_s));
        json_object_set_new(object, "bound_gap", json_real(plan->simulated_s / plan->bound_s - 1));
    }
    if (object && plan->rows > 0) {
        json_object_set_new(object, "rows", json_integer(plan->rows));
        json_object_set_new(object, "global_batch", json_integer(hapt_plan_global_batch(plan)));
    }
    if (object && plan->exchange_s > 0)
        json_object_set_new(object, "tied_exchange",
                            json_pack("{s:s, s:f, s:f}", "type", hapt_tied_exchange_name(plan->exchange), "seconds",
                                      plan->exchange_s, "bytes", plan->exchange_bytes));
    if (object && plan->edge_count > 0) json_object_set_new(object, "messages", messages_json(plan));
    if (object && plan->transfer_slots > 0 && !hapt_schedule_loops(plan->schedule))
        json_object_set_new(object, "transfer_slots", json_integer(plan->transfer_slots));
    if (object && plan->profile != HAPT_PROFILE_UNKNOWN)
        json_object_set_new(object, "profile", json_string(hapt_profile_origin_name(plan->profile)));
    return object;
}

enum hapt_status hapt_plan_print_json(const struct hapt_plan *plan, struct json_t *extra)
{
    json_t *object = hapt_plan_json(plan);
    if (extra && json_object_update(object, extra) != 0) {
        json_decref(object);
        object = NULL;
    }
    if (!object) return hapt_fail(HAPT_ERR_MEMORY, NULL, "the plan's JSON could not be built");
    const int error = json_dumpf(object, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(17));
    json_decref(object);
    if (error || putchar('\n') == EOF || fflush(stdout) != 0)
        return hapt_fail(HAPT_ERR_IO, NULL, "standard output cannot be written");
    return HAPT_OK;
}
