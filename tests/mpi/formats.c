/*
 * ranks: 1
 * Readers of today read files of every format as they were written once (tests/data/formats). The test lists their
 * content and compares it with the list beside them.
 *
 * A later format version gets its own folder; existing files are never written again. FORMATS_WRITE=1 writes the list
 * of a new folder.
 */
#include <unistd.h>

#include "hapt/calibration.h"
#include "hapt/cluster.h"
#include "hapt/model.h"
#include "hapt/plan.h"
#include "hapt/profile.h"
#include "hapt/report.h"
#include "hapt/train.h"
#include "test.h"

#define FOLDER "tests/data/formats/1/"
#define FOLDER_2 "tests/data/formats/2/" /* plans of version 2; the other formats have one version */
#define CONTENTS FOLDER "contents.txt"

static FILE *list;
static struct hapt_arena arena;

static void tell(const char *format, ...) __attribute__((format(printf, 1, 2)));

static void tell(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vfprintf(list, format, arguments);
    va_end(arguments);
    fputc('\n', list);
}

/* Summarises an array in one line: how many values are finite, their sum, and their sum weighted by index. */
static void tell_values(const char *name, int64_t count, const double *value)
{
    int64_t finite = 0;
    double sum = 0, weighted = 0;
    for (int64_t i = 0; value && i < count; i++) {
        if (!isfinite(value[i])) continue;
        finite++;
        sum += value[i];
        weighted += value[i] * (double)(i + 1);
    }
    tell("  %s: %lld, %lld finite, %.12g %.12g", name, (long long)count, (long long)finite, sum, weighted);
}

static void list_data(const char *path)
{
    struct hapt_h5 *file;
    int64_t shape[] = {-1}, vocab;
    double *token;
    CHECK_OK(hapt_h5_open(path, "hapt-data", 1, false, &file));
    CHECK_OK(hapt_h5_read_attribute_int(file, "/", "vocab", &vocab));
    CHECK_OK(hapt_h5_read(file, "/tokens", HAPT_H5_F64, 1, shape, 1000, &arena, (void **)&token));
    hapt_h5_close(file);
    tell("data: vocabulary %lld", (long long)vocab);
    tell_values("tokens", shape[0], token);
}

static void list_images(const char *path)
{
    struct hapt_h5 *file;
    int64_t shape[] = {-1, -1, -1, -1}, labels[] = {-1}, channels[] = {-1};
    double *pixel, *label, *mean;
    CHECK_OK(hapt_h5_open(path, "hapt-data", 1, false, &file));
    CHECK_OK(hapt_h5_read(file, "/images", HAPT_H5_F64, 4, shape, 100000, &arena, (void **)&pixel));
    CHECK_OK(hapt_h5_read(file, "/labels", HAPT_H5_F64, 1, labels, 1000, &arena, (void **)&label));
    CHECK_OK(hapt_h5_read(file, "/mean", HAPT_H5_F64, 1, channels, 10, &arena, (void **)&mean));
    hapt_h5_close(file);
    tell("images: %lld x %lld x %lld x %lld", (long long)shape[0], (long long)shape[1], (long long)shape[2],
         (long long)shape[3]);
    tell_values("pixels", shape[0] * shape[1] * shape[2] * shape[3], pixel);
    tell_values("labels", labels[0], label);
    tell_values("mean", channels[0], mean);
}

static void list_model(const char *path)
{
    struct hapt_model *model;
    CHECK_OK(hapt_model_load(path, &arena, &model));
    const struct hapt_graph *graph = model->graph;
    tell("model: %s, microbatch %d, sequence %d, vocabulary %d, %s, seed %llu, parameters %d, data %d", model->family,
         model->microbatch, model->sequence, model->vocab, hapt_dtype_name(model->dtype),
         (unsigned long long)model->seed, model->has_parameters, model->has_data);
    for (int s = 0; s < model->setting_count; s++)
        tell("  setting %s = %s", model->setting[s].name, model->setting[s].value);
    for (int s = 0; s < model->training_count; s++)
        tell("  training %s = %s", model->training[s].name, model->training[s].value);
    for (int o = 0; o < graph->forward_count; o++)
        tell("  operator %s: %s, %d inputs, first %s", graph->op[o].name, hapt_op_type_at(graph->op[o].type)->name,
             graph->op[o].input_count, graph->tensor[graph->op[o].input[0]].name);
    for (int t = 0; t < graph->tensor_count; t++) {
        if (graph->tensor[t].kind != HAPT_TENSOR_PARAMETER) continue;
        const int64_t count = hapt_tensor_elements(&graph->tensor[t]);
        float *value = malloc((size_t)count * sizeof *value);
        double *wide = malloc((size_t)count * sizeof *wide);
        CHECK_OK(hapt_model_initial(model, t, value));
        for (int64_t i = 0; i < count; i++) wide[i] = value[i];
        tell_values(graph->tensor[t].name, count, wide);
        free(value), free(wide);
    }
}

static void list_profile(const char *path)
{
    struct hapt_profile *profile;
    CHECK_OK(hapt_profile_load(path, &arena, &profile));
    const int64_t L = profile->layer_count, C = profile->cluster_count;
    tell("profile: %d layers, %s, %s, %d layouts, flops %.12g", profile->layer_count,
         hapt_precision_name(profile->precision), hapt_profile_origin_name(profile->origin), profile->layout_count,
         profile->flops);
    tell_values("boundary_bytes", L, profile->boundary_bytes);
    tell_values("tied_bytes", profile->tied_bytes ? L : 0, profile->tied_bytes);
    tell_values("link_bandwidth", C * C, profile->link_bandwidth);
    tell_values("link_latency", C * C, profile->link_latency);
    for (int c = 0; c < C; c++) {
        const struct hapt_profile_cluster *cluster = &profile->cluster[c];
        const int64_t count = cluster->submesh_count * L * L;
        tell("  subcluster %s: %d x %d, %.12g bytes, %.12g flops", cluster->name, cluster->nodes,
             cluster->devices_per_node, cluster->device_memory_bytes, cluster->peak_flops);
        for (int s = 0; s < cluster->submesh_count; s++)
            tell("  submesh %d x %d tp %d program %d", cluster->submesh[s].n, cluster->submesh[s].m,
                 cluster->submesh[s].tp, cluster->submesh[s].program);
        tell_values("stage_time", count, cluster->stage_time);
        tell_values("stage_forward_time", count, cluster->stage_forward_time);
        tell_values("parameter_bytes", count, cluster->parameter_bytes);
        tell_values("activation_bytes", count, cluster->activation_bytes);
        tell_values("step_time", cluster->step_time ? count : 0, cluster->step_time);
    }
    for (int k = 0; k < profile->mixed_count; k++) {
        const struct hapt_profile_mixed *mixed = &profile->mixed[k];
        tell("  mixed of %d subclusters, %d and %d devices, program %d", mixed->count, mixed->devices[0],
             mixed->devices[1], mixed->program);
        tell_values("stage_time", L * L, mixed->stage_time);
        tell_values("parameter_bytes", mixed->memory_rows * L * L, mixed->parameter_bytes);
        tell_values("ratio", mixed->ratio ? mixed->devices[0] + mixed->devices[1] : 0, mixed->ratio);
    }
}

static void list_plan(const struct hapt_plan *plan)
{
    char text[HAPT_PLAN_STAGE_CHARS];
    tell("plan: %d microbatches, %s, %d layers, limit %s, %s, latency %.12g, t_max %.12g, simulated %.12g, eta %.12g",
         plan->microbatches, hapt_schedule_kind_name(plan->schedule), plan->layer_count, plan->limit,
         hapt_precision_name(plan->precision), plan->latency_s, plan->t_max_s, plan->simulated_s, plan->balance_eta);
    for (int s = 0; s < plan->stage_count; s++) {
        const struct hapt_plan_stage *stage = &plan->stage[s];
        tell("  stage %s: operators %d to %d, launches %d, %.12g s, forward %.12g s, step %.12g s, transfer %.12g s, "
             "%.12g bytes of %.12g",
             hapt_plan_stage_text(stage, text), stage->first_op, stage->end_op, stage->warmup, stage->compute_s,
             stage->forward_s, stage->step_s, stage->comm_s, stage->memory_bytes, stage->device_memory_bytes);
        if (hapt_plan_is_mixed(stage) && stage->layout.ratio)
            tell_values("ratio", stage->submesh->devices[0] + stage->submesh->devices[1], stage->layout.ratio);
    }
}

static void load_and_list_plan(const char *path)
{
    struct hapt_plan *plan;
    CHECK_OK(hapt_plan_load(path, &arena, &plan));
    list_plan(plan);
}

static void list_efficiency(const char *path)
{
    struct hapt_efficiency *efficiency;
    CHECK_OK(hapt_efficiency_load(path, &arena, &efficiency));
    tell("efficiency:");
    for (int r = 0; r < hapt_efficiency_row_count(efficiency); r++) {
        const struct hapt_efficiency_row row = hapt_efficiency_row_at(efficiency, r);
        tell("  %s %s %s: %.12g %s, %d samples, %.12g, residual %.12g", row.device, hapt_dtype_name(row.dtype),
             row.class, row.size, row.unit, row.samples, row.efficiency, row.worst_residual);
    }
}

static void list_cluster(const struct hapt_cluster *cluster)
{
    tell("cluster:");
    for (int c = 0; c < cluster->count; c++) {
        const struct hapt_subcluster *own = &cluster->subcluster[c];
        tell("  %s: %d x %d of %s (%s), memory %.12g, slowdown %.12g, inside %.12g byte/s %.12g s, between %.12g "
             "byte/s %.12g s, hosts %d",
             own->name, own->nodes, own->devices_per_node, own->device.name, own->device.backend,
             own->device.memory_capped ? own->device.memory_bytes : 0, own->device.slowdown, own->intra_node_bandwidth,
             own->intra_node_latency, own->inter_node_bandwidth, own->inter_node_latency, own->host_count);
    }
    for (int l = 0; l < cluster->count * cluster->count; l++)
        tell("  link %d: %.12g byte/s, %.12g s, paced %d", l, cluster->link[l].bandwidth, cluster->link[l].latency,
             cluster->link[l].paced);
    tell("  collectives over %d sizes", cluster->collective_count);
}

static void load_and_list_cluster(const char *path)
{
    struct hapt_cluster *cluster;
    CHECK_OK(hapt_cluster_load(path, &arena, &cluster));
    list_cluster(cluster);
}

static void list_topology(const char *path)
{
    struct hapt_h5 *file;
    struct hapt_cluster *cluster;
    CHECK_OK(hapt_h5_open(path, "hapt-topology", 1, false, &file));
    CHECK_OK(hapt_cluster_read(file, "/topology", &arena, &cluster));
    hapt_h5_close(file);
    list_cluster(cluster);
}

static void list_run(const char *path)
{
    struct hapt_report *report;
    CHECK_OK(hapt_report_load(path, &arena, &report));
    tell("run: %lld steps from %lld, %s, loss %.12g to %.12g, step %.12g s, predicted %.12g s, %.12g items/s, %lld "
         "ranks, checkpoint %s",
         (long long)report->steps, (long long)report->first_step, report->item, report->first_loss, report->last_loss,
         report->step_s, report->predicted_step_s, report->items_per_s, (long long)report->rank_count,
         report->checkpoint);
    for (int s = 0; s < report->plan->stage_count; s++)
        tell("  stage %d: busy %.12g s, idle %.12g s, communication %.12g s, planned %.12g bytes, measured %.12g bytes",
             s, report->stage[s].busy_s, report->stage[s].idle_s, report->stage[s].comm_s,
             report->stage[s].planned_bytes, report->stage[s].measured_bytes);
    tell_values("loss", report->steps, report->loss);
    list_plan(report->plan);
}

static void list_checkpoint(const char *path)
{
    struct hapt_checkpoint *checkpoint;
    struct hapt_model *model;
    CHECK_OK(hapt_checkpoint_find(&test_env, path, &arena, &checkpoint));
    CHECK_OK(hapt_model_load(FOLDER "plain.h5", &arena, &model));
    CHECK_OK(hapt_checkpoint_fits(checkpoint, model));
    tell("checkpoint: step %lld, %d shards, %lld parameters, %d states, data %s of %lld, seed %lld",
         (long long)checkpoint->step, checkpoint->shard_count, (long long)checkpoint->parameter_count,
         checkpoint->state_count, checkpoint->data.kind, (long long)checkpoint->data.count,
         (long long)checkpoint->data.seed);
    for (int64_t o = 0; o < checkpoint->option_count; o++)
        tell("  option %s = %s", checkpoint->option[o], checkpoint->value[o]);
    tell_values("loss", checkpoint->history.count, checkpoint->history.loss);
    tell_values("learning_rate", checkpoint->history.count, checkpoint->history.learning_rate);
    for (int t = 0; t < model->graph->tensor_count; t++) {
        const struct hapt_tensor *tensor = &model->graph->tensor[t];
        if (tensor->kind != HAPT_TENSOR_PARAMETER) continue;
        const int64_t count = hapt_tensor_elements(tensor);
        float *value = malloc((size_t)count * sizeof *value);
        double *wide = malloc((size_t)count * sizeof *wide);
        for (int state = -1; state < checkpoint->state_count; state++) {
            char name[300];
            CHECK_OK(hapt_checkpoint_read(checkpoint, tensor->name, state, count, value));
            for (int64_t i = 0; i < count; i++) wide[i] = value[i];
            snprintf(name, sizeof name, "%s, state %d", tensor->name, state);
            tell_values(name, count, wide);
        }
        free(value), free(wide);
    }
    list_plan(checkpoint->plan);
}

static void list_weights(const char *path)
{
    struct hapt_h5 *file;
    const char **name;
    int64_t count;
    CHECK_OK(hapt_h5_open(path, "hapt-weights", 1, false, &file));
    CHECK_OK(hapt_h5_list(file, "/parameters", 1000, &arena, &count, &name));
    tell("weights: %lld", (long long)count);
    for (int64_t p = 0; p < count; p++) {
        int dims;
        int64_t shape[HAPT_H5_MAX_DIMS], elements = 1;
        double *value;
        const char *dataset = hapt_arena_printf(&arena, "/parameters/%s", name[p]);
        CHECK_OK(hapt_h5_shape(file, dataset, &dims, shape));
        CHECK_OK(hapt_h5_read(file, dataset, HAPT_H5_F64, dims, shape, 100000, &arena, (void **)&value));
        for (int d = 0; d < dims; d++) elements *= shape[d];
        tell_values(name[p], elements, value);
    }
    hapt_h5_close(file);
}

static void compare(const char *written, const char *expected)
{
    char a[4096], b[4096];
    FILE *now = fopen(written, "r"), *then = fopen(expected, "r");
    int line = 0;
    CHECK(now && then);
    while (now && then) {
        char *first = fgets(a, sizeof a, now), *second = fgets(b, sizeof b, then);
        line++;
        CHECK_MESSAGE((first != NULL) == (second != NULL), "%s has another number of lines", expected);
        if (!first || !second) break;
        CHECK_MESSAGE(strcmp(a, b) == 0, "line %d:\n  is  %s  was %s", line, a, b);
    }
    CHECK(line > 300);
    if (now) fclose(now);
    if (then) fclose(then);
}

static void files_hold_what_they_held(void)
{
    char path[] = "/tmp/hapt-formats-XXXXXX";
    const bool write = getenv("FORMATS_WRITE") != NULL;
    const int descriptor = write ? -1 : mkstemp(path);
    list = write ? fopen(CONTENTS, "w") : fdopen(descriptor, "w");
    CHECK(list != NULL);
    hapt_arena_init(&arena);
    list_data(FOLDER "data.h5");
    list_images(FOLDER "images.h5");
    list_model(FOLDER "model.h5");
    list_model(FOLDER "plain.h5");
    list_weights(FOLDER "weights.h5");
    list_profile(FOLDER "profile.h5");
    list_efficiency(FOLDER "efficiency.h5");
    load_and_list_plan(FOLDER "plan.h5");
    load_and_list_plan(FOLDER "two.h5");
    load_and_list_plan(FOLDER "mixed.h5");
    load_and_list_plan(FOLDER_2 "plan.h5");
    load_and_list_plan(FOLDER_2 "mixed.h5");
    load_and_list_cluster(FOLDER "cluster.json");
    load_and_list_cluster(FOLDER "paper.json");
    list_topology(FOLDER "topology.h5");
    list_run(FOLDER "run.h5");
    list_checkpoint(FOLDER "checkpoint");
    hapt_arena_release(&arena);
    CHECK(fclose(list) == 0);
    if (write) return;
    compare(path, CONTENTS);
    unlink(path);
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    RUN(files_hold_what_they_held);
    return test_finish();
}
