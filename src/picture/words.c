/* The plan in sentences. */
#include "page.h"

#include <math.h>

/* "1 node x 4 devices of a100, 2 devices sharing each operator"; a mixed stage: "2 devices of fast and 1 device of
 * slow". */
static void put_place(struct hapt_svg *svg, const struct hapt_plan_stage *stage)
{
    const struct hapt_plan_submesh *submesh = stage->submesh;
    const int devices = hapt_plan_submesh_size(submesh), share = stage->layout.tensor_parallel;
    if (hapt_plan_is_mixed(stage)) {
        for (int k = 0; k < submesh->part_count; k++)
            hapt_svg_textf(svg, "%s%d device%s of %s",
                           k == 0                        ? ""
                           : k + 1 < submesh->part_count ? ", "
                                                         : " and ",
                           submesh->devices[k], submesh->devices[k] > 1 ? "s" : "", submesh->part_name[k]);
    } else {
        hapt_svg_textf(svg, "%d node%s \xC3\x97 %d device%s of %s", submesh->nodes, submesh->nodes > 1 ? "s" : "",
                       submesh->devices_per_node, submesh->devices_per_node > 1 ? "s" : "", submesh->name);
    }
    if (stage->layout.program)
        hapt_svg_textf(svg, ", with the synthesised program %s", stage->layout.program->name);
    else if (share > 1 && share < devices)
        hapt_svg_put(svg, ", %d-way tensor parallel and %d-way data parallel", share, devices / share);
    else if (devices > 1)
        hapt_svg_put(svg, ", %d-way %s parallel", devices, share > 1 ? "tensor" : "data");
}

static void put_stage(struct hapt_svg *svg, const struct hapt_plan *plan, int i)
{
    const struct hapt_plan_stage *stage = &plan->stage[i];
    const int layers = stage->end_layer - stage->first_layer;
    char text[2][32];
    hapt_svg_put(
        svg, "<li class=\"stage\" data-stage=\"%d\" data-first-layer=\"%d\" data-end-layer=\"%d\" data-warmup=\"%d\"",
        i, stage->first_layer, stage->end_layer, stage->warmup);
    hapt_svg_number(svg, "compute-s", stage->compute_s);
    hapt_svg_number(svg, "comm-s", stage->comm_s);
    hapt_svg_number(svg, "memory-bytes", stage->memory_bytes);
    hapt_svg_put(svg, "><strong>Stage %d</strong> runs ", i);
    if (layers == 1)
        hapt_svg_put(svg, "layer %d on ", stage->first_layer);
    else
        hapt_svg_put(svg, "layers %d to %d (%d layers) on ", stage->first_layer, stage->end_layer - 1, layers);
    put_place(svg, stage);
    hapt_svg_put(svg, ". It computes %s per microbatch", hapt_units_time(stage->compute_s, text[0]));
    if (stage->forward_only)
        hapt_svg_put(svg, ", and has no backward pass");
    else
        hapt_svg_put(svg, ", %s of it forward", hapt_units_time(stage->forward_s, text[1]));
    hapt_svg_put(svg, ". It has at most %d microbatch%s in flight", stage->warmup, stage->warmup > 1 ? "es" : "");
    hapt_svg_put(svg, ", and needs %s of the %s of a device.", hapt_units_bytes(stage->memory_bytes, text[0]),
                 hapt_units_bytes(stage->device_memory_bytes, text[1]));
    if (stage->layout.unit_count > 0)
        hapt_svg_put(svg, " %d block%s activations in the backward pass.", stage->layout.unit_count,
                     stage->layout.unit_count > 1 ? "s recompute" : " recomputes");
    if (hapt_weights_on_host(stage->layout.weights_at)) hapt_svg_put(svg, " Its weights are on the hosts.");
    if (stage->layout.weights_at == HAPT_WEIGHTS_SHARDED)
        hapt_svg_put(svg, " Its weights are sharded over its devices.");
    if (i + 1 < plan->stage_count)
        hapt_svg_put(svg, " A transfer to stage %d takes %s in each direction.", i + 1,
                     hapt_units_time(stage->comm_s, text[0]));
    hapt_svg_put(svg, "</li>\n");
}

void picture_section_words(struct hapt_svg *svg, const struct hapt_plan *plan)
{
    const double mfu = hapt_plan_mfu(plan);
    char text[3][32];
    hapt_svg_put(
        svg,
        "<section id=\"plan\">\n<h2>The plan in words</h2>\n<p>The pipeline has %d stage%s. A step has %d microbatch%s",
        plan->stage_count, plan->stage_count > 1 ? "s" : "", plan->microbatches, plan->microbatches > 1 ? "es" : "");
    if (plan->rows > 0) hapt_svg_put(svg, " of %d row%s", plan->rows, plan->rows > 1 ? "s" : "");
    hapt_svg_put(svg, ", under the schedule %s%s.", hapt_schedule_kind_name(plan->schedule),
                 plan->split ? " with split backward passes (zero bubble)" : "");
    if (hapt_schedule_loops(plan->schedule))
        hapt_svg_put(svg, " The pipeline visits its %d submeshes %d times.", plan->submesh_count,
                     hapt_plan_loops(plan));
    if (plan->precision != HAPT_PRECISION_UNKNOWN)
        hapt_svg_put(svg, " It computes in %s.", hapt_precision_name(plan->precision));
    if (plan->profile == HAPT_PROFILE_PREDICTED)
        hapt_svg_put(svg, " Times are predicted from the description of the devices, not measured.");
    hapt_svg_put(svg, " The simulated step takes %s", hapt_units_time(plan->simulated_s, text[0]));
    if (plan->bound_s > 0 && plan->bound_s < plan->simulated_s)
        hapt_svg_put(svg, ", at most %.2g %% more than any plan needs (%s)",
                     100 * (plan->simulated_s / plan->bound_s - 1), hapt_units_time(plan->bound_s, text[1]));
    hapt_svg_put(svg, ". The slowest resource takes %s per microbatch (t_max), set by ",
                 hapt_units_time(plan->t_max_s, text[2]));
    hapt_svg_text(svg, plan->limit);
    hapt_svg_put(svg, "; the balance of the stages is %.1f %%.", 100 * plan->balance_eta);
    if (mfu > 0) hapt_svg_put(svg, " The model FLOPs utilisation is %.1f %%.", 100 * mfu);
    if (plan->exchange_s > 0)
        hapt_svg_put(
            svg, " Once a step, the first and the last stage exchange gradients of tied parameters, which takes %s.",
            hapt_units_time(plan->exchange_s, text[0]));
    if (plan->host_state)
        hapt_svg_put(svg, " The optimizer state is on the hosts; %s.",
                     plan->host_update ? "their CPUs update the parameters"
                                       : "the update copies it to the devices and back");
    hapt_svg_put(svg, "</p>\n<ol start=\"0\">\n");
    for (int i = 0; i < plan->stage_count; i++) put_stage(svg, plan, i);
    hapt_svg_put(svg, "</ol>\n</section>\n");
}
