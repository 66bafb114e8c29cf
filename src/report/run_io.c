/* Writes and reads the run file. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/lock.h"
#include "hapt/report.h"
#include "nexus.h"

enum { VERSION = 1, LOSS_WINDOW = 20 };

struct settings {
    struct hapt_arena *arena;
    const char **name, **value;
    int64_t count, capacity;
    bool failed;
};

static void collect(void *context, const char *name, const char *value)
{
    struct settings *settings = context;
    if (settings->count < settings->capacity) {
        settings->name[settings->count] = name;
        settings->value[settings->count] = value;
    }
    settings->count++;
}

/* Writes the training options in use, as two text columns. */
static enum hapt_status write_settings(struct hapt_h5 *file, const struct hapt_config *config)
{
    const char *name[64], *value[64];
    struct settings settings = {.name = name, .value = value, .capacity = 64};
    hapt_config_visit_training(config, collect, &settings);
    HAPT_ASSERT(settings.count <= settings.capacity);
    HAPT_TRY(hapt_h5_write_strings(file, "/settings/option", settings.count, name));
    return hapt_h5_write_strings(file, "/settings/value", settings.count, value);
}

static enum hapt_status write_state(struct hapt_h5 *file, const char *state)
{
    char now[HAPT_TIME_ISO_CHARS];
    HAPT_TRY(hapt_h5_write_attribute_text(file, "/", "state", state));
    return hapt_h5_write_attribute_text(file, "/", "written", hapt_time_iso(hapt_time_epoch_s(), now));
}

static enum hapt_status write_run(struct hapt_h5 *file, const struct hapt_run *run, const char *state)
{
    char title[HAPT_MODEL_TITLE];
    HAPT_TRY(write_state(file, state));
    HAPT_TRY(hapt_cluster_write(file, "/topology", run->cluster));
    if (run->layers) HAPT_TRY(hapt_layers_write(file, "/layers", run->layers));
    if (run->profile) HAPT_TRY(hapt_profile_write(file, "/profile", run->profile));
    HAPT_TRY(hapt_plan_write(file, "/plan", run->plan));
    HAPT_TRY(write_settings(file, run->config));
    HAPT_TRY(hapt_h5_write_attribute_text(file, "/settings", "model", hapt_model_title(run->model, title)));
    HAPT_TRY(hapt_environment_write(file, run->result->rank_count, run->result->environment));
    HAPT_TRY(hapt_train_write(file, run->result));
    HAPT_TRY(hapt_train_write_trace(file, run->result));
    return nexus_write(file, run->result);
}

/* The lock is checked again before the file gets its name, because writing may take long. */
enum hapt_status hapt_run_save(const struct hapt_run *run, const char *state, const char *path)
{
    struct hapt_h5 *file = NULL;
    HAPT_TRY(hapt_lock_check());
    HAPT_TRY(hapt_h5_create(path, "hapt-run", VERSION, &file));
    enum hapt_status status = write_run(file, run, state);
    if (status == HAPT_OK) status = hapt_lock_check();
    return hapt_h5_finish(file, status);
}

/* Median over the steps of one column of a [steps][stages] table. */
static enum hapt_status column_median(const double *table, int64_t steps, int stages, int stage,
                                      struct hapt_arena *scratch, double *median)
{
    double *column;
    HAPT_NEW(column, scratch, steps > 0 ? steps : 1);
    for (int64_t i = 0; i < steps; i++) column[i] = table[i * stages + stage];
    *median = steps > 0 ? hapt_train_median(column, 0, steps, 0) : 0;
    return HAPT_OK;
}

struct tables {
    int64_t steps;                                               /* of this run */
    const double *loss, *gradient_norm, *learning_rate, *time_s; /* [steps], of all runs */
    const double *busy_s, *idle_s, *comm_s, *reduce_s;           /* [steps][stages] */
    const double *microbatch_s;                                  /* [steps][stages]; NULL: an older file without it */
    const double *planned_bytes, *measured_bytes;                /* [stages] */
    const double *host_bytes;                                    /* [stages], or NULL */
};

static enum hapt_status fill(struct hapt_report *report, const struct tables *tables, struct hapt_arena *arena)
{
    const int stages = report->plan->stage_count;
    report->predicted_step_s = report->plan->simulated_s;
    report->loss = report->time_scale > 0 ? NULL : tables->loss;
    report->gradient_norm = report->time_scale > 0 ? NULL : tables->gradient_norm;
    report->learning_rate = tables->learning_rate;
    report->time_s = tables->time_s;
    if (report->steps > 0 && report->loss) {
        report->first_loss = tables->loss[0];
        report->last_loss = tables->loss[report->steps - 1];
        report->loss_window = report->steps < LOSS_WINDOW ? (int)report->steps : LOSS_WINDOW;
        for (int i = 0; i < report->loss_window; i++)
            report->mean_loss += tables->loss[report->steps - 1 - i] / report->loss_window;
    }
    HAPT_NEW(report->stage, arena, stages);
    for (int i = 0; i < stages; i++) {
        struct hapt_report_stage *stage = &report->stage[i];
        HAPT_TRY(column_median(tables->busy_s, tables->steps, stages, i, arena, &stage->busy_s));
        HAPT_TRY(column_median(tables->idle_s, tables->steps, stages, i, arena, &stage->idle_s));
        HAPT_TRY(column_median(tables->comm_s, tables->steps, stages, i, arena, &stage->comm_s));
        HAPT_TRY(column_median(tables->reduce_s, tables->steps, stages, i, arena, &stage->reduce_s));
        if (tables->microbatch_s)
            HAPT_TRY(column_median(tables->microbatch_s, tables->steps, stages, i, arena, &stage->microbatch_s));
        stage->planned_bytes = tables->planned_bytes[i];
        stage->measured_bytes = tables->measured_bytes[i];
        if (tables->host_bytes) stage->host_bytes = tables->host_bytes[i];
    }
    return HAPT_OK;
}

enum hapt_status hapt_report_build(const struct hapt_run *run, struct hapt_arena *arena, struct hapt_report **result)
{
    const struct hapt_train_result *train = run->result;
    struct hapt_report *report;
    HAPT_NEW(report, arena, 1);
    *report = (struct hapt_report){.plan = run->plan,
                                   .cluster = run->cluster,
                                   .steps = train->history.count,
                                   .validation_count = train->history.validation_count,
                                   .validation = train->history.validation,
                                   .first_step = train->first_step,
                                   .step_s = train->steady_step_s,
                                   .item = train->item,
                                   .items_per_s = train->items_per_s,
                                   .flops_per_item = train->flops_per_item,
                                   .peak_flops = train->peak_flops,
                                   .state = train->stopped_by ? HAPT_RUN_STOPPED : HAPT_RUN_FINISHED,
                                   .time_scale = train->time_scale,
                                   .max_lateness_s = train->late_s,
                                   .checkpoint = train->checkpoint,
                                   .checkpoint_s = train->checkpoint_s,
                                   .stopped = train->stopped_by != NULL};
    report->written = "";
    report->items_per_step = train->items_per_step;
    report->rank_count = train->rank_count;
    report->environment = train->environment;
    report->warning_count = train->warning_count;
    HAPT_NEW(report->warning, arena, train->warning_count > 0 ? train->warning_count : 1);
    for (int w = 0; w < train->warning_count; w++)
        report->warning[w] = (struct hapt_report_warning){train->warning[w].step, train->warning[w].text};
    const struct tables tables = {.steps = train->history.count - train->first_step,
                                  .loss = train->history.loss,
                                  .gradient_norm = train->history.gradient_norm,
                                  .learning_rate = train->history.learning_rate,
                                  .time_s = train->history.time_s,
                                  .busy_s = train->busy_s,
                                  .idle_s = train->idle_s,
                                  .comm_s = train->comm_s,
                                  .reduce_s = train->reduce_s,
                                  .microbatch_s = train->microbatch_s,
                                  .planned_bytes = train->planned_bytes,
                                  .measured_bytes = train->measured_bytes,
                                  .host_bytes = train->host_bytes};
    HAPT_TRY(fill(report, &tables, arena));
    *result = report;
    return HAPT_OK;
}

/* Reads one value per step, or a table per step and stage. Absent if no step was taken. */
static enum hapt_status read_table(struct hapt_h5 *file, const char *name, int dims, int64_t rows, int64_t columns,
                                   struct hapt_arena *arena, const double **table)
{
    int64_t shape[2] = {rows, columns};
    void *data = NULL;
    if (rows == 0) return HAPT_OK;
    HAPT_TRY(hapt_h5_read(file, name, HAPT_H5_F64, dims, shape, (int64_t)1 << 28, arena, &data));
    *table = data;
    return HAPT_OK;
}

static enum hapt_status read_curves(struct hapt_h5 *file, struct hapt_report *report, struct hapt_arena *arena,
                                    struct tables *tables)
{
    const int64_t steps = report->steps;
    if (report->time_scale == 0) {
        HAPT_TRY(read_table(file, "/train/loss", 1, steps, -1, arena, &tables->loss));
        HAPT_TRY(read_table(file, "/train/gradient_norm", 1, steps, -1, arena, &tables->gradient_norm));
    }
    HAPT_TRY(read_table(file, "/train/learning_rate", 1, steps, -1, arena, &tables->learning_rate));
    HAPT_TRY(read_table(file, "/train/step_time", 1, steps, -1, arena, &tables->time_s));
    if (hapt_h5_has_attribute(file, "/train", "peak_flops"))
        HAPT_TRY(hapt_h5_read_attribute_real(file, "/train", "peak_flops", &report->peak_flops));
    return HAPT_OK;
}

/* Files of earlier versions have neither: they were written at the end. */
static enum hapt_status read_state(struct hapt_h5 *file, struct hapt_report *report, struct hapt_arena *arena)
{
    report->state = report->written = "";
    if (hapt_h5_has_attribute(file, "/", "state"))
        HAPT_TRY(hapt_h5_read_attribute_text(file, "/", "state", arena, &report->state));
    if (hapt_h5_has_attribute(file, "/", "written"))
        HAPT_TRY(hapt_h5_read_attribute_text(file, "/", "written", arena, &report->written));
    report->stopped = strcmp(report->state, HAPT_RUN_STOPPED) == 0;
    return HAPT_OK;
}

static enum hapt_status read_train(struct hapt_h5 *file, struct hapt_report *report, struct hapt_arena *arena)
{
    struct tables tables = {0};
    int64_t shape[HAPT_H5_MAX_DIMS] = {0};
    int dims = 0;
    const int64_t stages = report->plan->stage_count;
    if (hapt_h5_exists(file, "/train/step_time")) HAPT_TRY(hapt_h5_shape(file, "/train/step_time", &dims, shape));
    if (hapt_h5_has_attribute(file, "/train", "time_scale")) {
        HAPT_TRY(hapt_h5_read_attribute_real(file, "/train", "time_scale", &report->time_scale));
        HAPT_TRY(hapt_h5_read_attribute_real(file, "/train", "latest", &report->max_lateness_s));
    }
    report->steps = dims == 1 ? shape[0] : 0;
    HAPT_TRY(hapt_h5_read_attribute_int(file, "/train", "first_step", &report->first_step));
    HAPT_TRY(hapt_h5_read_attribute_int(file, "/train", "items_per_step", &report->items_per_step));
    HAPT_TRY(hapt_h5_read_attribute_text(file, "/train", "item", arena, &report->item));
    HAPT_TRY(hapt_h5_read_attribute_real(file, "/train", "steady_step_time", &report->step_s));
    HAPT_TRY(hapt_h5_read_attribute_real(file, "/train", "flops_per_item", &report->flops_per_item));
    HAPT_TRY(hapt_h5_read_attribute_text(file, "/train", "checkpoint", arena, &report->checkpoint));
    if (hapt_h5_has_attribute(file, "/train", "checkpoint_time"))
        HAPT_TRY(hapt_h5_read_attribute_real(file, "/train", "checkpoint_time", &report->checkpoint_s));
    if (report->first_step < 0 || report->first_step > report->steps)
        return hapt_fail(HAPT_ERR_INPUT, "the file is damaged", "%s: first_step is out of range", hapt_h5_path(file));
    tables.steps = report->steps - report->first_step;
    HAPT_TRY(read_curves(file, report, arena, &tables));
    HAPT_TRY(read_table(file, "/train/stage_busy", 2, tables.steps, stages, arena, &tables.busy_s));
    HAPT_TRY(read_table(file, "/train/stage_idle", 2, tables.steps, stages, arena, &tables.idle_s));
    HAPT_TRY(read_table(file, "/train/stage_reduce", 2, tables.steps, stages, arena, &tables.reduce_s));
    HAPT_TRY(read_table(file, "/train/stage_communication", 2, tables.steps, stages, arena, &tables.comm_s));
    if (hapt_h5_exists(file, "/train/stage_microbatch"))
        HAPT_TRY(read_table(file, "/train/stage_microbatch", 2, tables.steps, stages, arena, &tables.microbatch_s));
    HAPT_TRY(read_table(file, "/train/memory_planned", 1, stages, -1, arena, &tables.planned_bytes));
    HAPT_TRY(read_table(file, "/train/memory_measured", 1, stages, -1, arena, &tables.measured_bytes));
    if (hapt_h5_exists(file, "/train/host_memory"))
        HAPT_TRY(read_table(file, "/train/host_memory", 1, stages, -1, arena, &tables.host_bytes));
    report->items_per_s = report->step_s > 0 ? (double)report->items_per_step / report->step_s : 0;
    return fill(report, &tables, arena);
}

enum { MAX_WARNINGS = 1 << 20 };

static enum hapt_status read_warnings(struct hapt_h5 *file, struct hapt_report *report, struct hapt_arena *arena)
{
    int64_t count = 0, rows = -1;
    const char **text = NULL;
    void *step = NULL;
    if (!hapt_h5_exists(file, "/train/warnings/text")) return HAPT_OK;
    HAPT_TRY(hapt_h5_read_strings(file, "/train/warnings/text", MAX_WARNINGS, arena, &count, &text));
    rows = count;
    HAPT_TRY(hapt_h5_read(file, "/train/warnings/step", HAPT_H5_I64, 1, &rows, MAX_WARNINGS, arena, &step));
    HAPT_NEW(report->warning, arena, count > 0 ? count : 1);
    for (int64_t w = 0; w < count; w++)
        report->warning[w] = (struct hapt_report_warning){((const int64_t *)step)[w], text[w]};
    report->warning_count = (int)count;
    return HAPT_OK;
}

enum hapt_status hapt_report_load(const char *path, struct hapt_arena *arena, struct hapt_report **result)
{
    struct hapt_h5 *file = NULL;
    struct hapt_report *report;
    struct hapt_plan *plan = NULL;
    HAPT_NEW(report, arena, 1);
    HAPT_TRY(hapt_h5_open(path, "hapt-run", VERSION, false, &file));
    enum hapt_status status = hapt_plan_read(file, "/plan", arena, &plan);
    report->plan = plan;
    struct hapt_cluster *cluster = NULL;
    if (status == HAPT_OK) status = hapt_cluster_read(file, "/topology", arena, &cluster);
    report->cluster = cluster;
    if (status == HAPT_OK && hapt_h5_has_attribute(file, "/settings", "model"))
        status = hapt_h5_read_attribute_text(file, "/settings", "model", arena, &report->model);
    if (status == HAPT_OK) status = read_state(file, report, arena);
    if (status == HAPT_OK) status = read_train(file, report, arena);
    struct hapt_history history = {0};
    if (status == HAPT_OK) status = hapt_validation_read(file, "/train", report->steps, arena, &history);
    report->validation = history.validation;
    report->validation_count = history.validation_count;
    if (status == HAPT_OK) status = read_warnings(file, report, arena);
    if (status == HAPT_OK) status = hapt_environment_read(file, arena, &report->rank_count, &report->environment);
    hapt_h5_close(file);
    if (status == HAPT_OK) *result = report;
    return status;
}
