/* `hapt check FILE...`: verifies each file and prints its state, kind and content, one line per file. */
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "hapt/calibration.h"
#include "hapt/command.h"
#include "hapt/report.h"
#include "json_print.h"

const char hapt_command_check_help[] =
    "Checks each file completely: its structure, the checksum of every dataset, every attribute, its format and\n"
    "version. The reader that the other commands use then checks the content. All kinds of files that hapt writes\n"
    "are known: models, data, weights, profiles, efficiency tables, plans, topologies, run files, timelines and\n"
    "cluster files (JSON), and checkpoints. A checkpoint is a folder with manifest.h5; its shards are compared with\n"
    "the manifest's checksums. For the folder of a run, the run file and all checkpoints are checked. HDF5 files of\n"
    "other programs are recognised by the names that they hold (/cluster_0, /parameters, /tokens, /batches,\n"
    "/images).\n"
    "\n"
    "Prints one line per file: good, damaged (use another copy), newer (a later version: use a newer hapt), foreign\n"
    "(not a file of hapt), missing, or unreadable (memory, open files, permissions or the disk; the file itself may\n"
    "be good).\n"
    "Exit code 0: all files are good; 3: some are not; 5 or 6: a file could not be read for lack of memory or I/O.\n"
    "--json:\n"
    "  {\"format\":\"hapt-check\",\"version\":1,\"good\":..,\n"
    "   \"files\":[{\"path\",\"state\",\"kind\",\"version\",\"holds\",\"message\"}, ...]}\n";

enum { TEXT_BYTES = 400 };

struct finding {
    const char *state; /* "good", or what is wrong */
    char kind[64], holds[TEXT_BYTES], message[TEXT_BYTES];
    int64_t version;
    enum hapt_status status;
};

struct totals {
    struct hapt_env *env;
    json_t *files; /* NULL: lines are printed */
    int checked, bad;
    enum hapt_status system; /* the first failure of memory or I/O, which says nothing about a file */
};

static void describe(struct finding *finding, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void describe(struct finding *finding, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(finding->holds, sizeof finding->holds, format, arguments);
    va_end(arguments);
}

/* ---- Kinds: each function loads a file as the other commands do and describes its content ---- */

static enum hapt_status check_model(const char *path, struct hapt_arena *arena, struct finding *finding)
{
    struct hapt_model *model;
    struct hapt_attachments files;
    HAPT_TRY(hapt_model_load(path, arena, &model));
    HAPT_TRY(hapt_model_files(model, arena, &files));
    describe(finding, "%s, %" PRId64 " parameters, %d operators", model->family, hapt_model_parameter_count(model),
             model->graph->forward_count);
    return HAPT_OK;
}

static enum hapt_status check_profile(const char *path, struct hapt_arena *arena, struct finding *finding)
{
    struct hapt_profile *profile;
    HAPT_TRY(hapt_profile_load(path, arena, &profile));
    describe(finding, "%d layers, %d subclusters", profile->layer_count, profile->cluster_count);
    return HAPT_OK;
}

static enum hapt_status check_efficiency(const char *path, struct hapt_arena *arena, struct finding *finding)
{
    struct hapt_efficiency *efficiency;
    HAPT_TRY(hapt_efficiency_load(path, arena, &efficiency));
    describe(finding, "%d rows", hapt_efficiency_row_count(efficiency));
    return HAPT_OK;
}

static enum hapt_status check_plan(const char *path, struct hapt_arena *arena, struct finding *finding)
{
    struct hapt_plan *plan;
    HAPT_TRY(hapt_plan_load(path, arena, &plan));
    describe(finding, "%d stages, %d microbatches", plan->stage_count, plan->microbatches);
    return HAPT_OK;
}

static enum hapt_status check_run(const char *path, struct hapt_arena *arena, struct finding *finding)
{
    struct hapt_report *report;
    HAPT_TRY(hapt_report_load(path, arena, &report));
    describe(finding, "%" PRId64 " steps on %d stages", report->steps, report->plan->stage_count);
    return HAPT_OK;
}

static enum hapt_status check_topology(const char *path, struct hapt_arena *arena, struct finding *finding)
{
    struct hapt_h5 *file;
    struct hapt_cluster *cluster;
    HAPT_TRY(hapt_h5_open(path, "hapt-topology", 1, false, &file));
    const enum hapt_status status = hapt_cluster_read(file, "/topology", arena, &cluster);
    hapt_h5_close(file);
    HAPT_TRY(status);
    describe(finding, "%d subclusters, %d devices", cluster->count, cluster->rank_count);
    return HAPT_OK;
}

static enum hapt_status check_cluster(const char *path, struct hapt_arena *arena, struct finding *finding)
{
    struct hapt_cluster *cluster;
    HAPT_TRY(hapt_cluster_load(path, arena, &cluster));
    describe(finding, "%d subclusters, %d devices", cluster->count, cluster->rank_count);
    return HAPT_OK;
}

/* Checks that tokens are below the file's vocabulary. Other checks of data need the model: training does them. */
static enum hapt_status check_tokens(struct hapt_h5 *file, struct hapt_arena *arena, struct finding *finding)
{
    enum { BLOCK = 1 << 20 };
    int dims = 0;
    int64_t shape[HAPT_H5_MAX_DIMS], vocab = 0;
    int32_t *token;
    HAPT_TRY(hapt_h5_shape(file, "/tokens", &dims, shape));
    if (dims != 1)
        return hapt_fail(HAPT_ERR_INPUT, "store it as [n]", "%s: /tokens has %d dimensions", hapt_h5_path(file), dims);
    if (hapt_h5_has_attribute(file, "/", "vocab")) HAPT_TRY(hapt_h5_read_attribute_int(file, "/", "vocab", &vocab));
    HAPT_NEW(token, arena, BLOCK);
    for (int64_t first = 0; first < shape[0]; first += BLOCK) {
        const int64_t count = shape[0] - first < BLOCK ? shape[0] - first : BLOCK;
        HAPT_TRY(hapt_h5_read_rows(file, "/tokens", HAPT_H5_I32, first, count, token));
        for (int64_t i = 0; i < count; i++)
            if (token[i] < 0 || (vocab > 0 && token[i] >= vocab))
                return hapt_fail(HAPT_ERR_INPUT, "create the file again",
                                 "%s: token %d at %" PRId64 " is outside the vocabulary of %" PRId64,
                                 hapt_h5_path(file), token[i], first + i, vocab);
    }
    describe(finding, "%" PRId64 " tokens%s", shape[0], vocab > 0 ? "" : ", vocabulary unknown");
    return HAPT_OK;
}

enum { MOST_INPUTS = 1 << 16 }; /* of a data file; a model may read a part of them */

static enum hapt_status check_open_data(struct hapt_h5 *file, struct hapt_arena *arena, struct finding *finding)
{
    int dims = 0;
    int64_t shape[HAPT_H5_MAX_DIMS];
    if (hapt_h5_exists(file, "/tokens")) return check_tokens(file, arena, finding);
    const char **field;
    int64_t fields = 0;
    if (hapt_h5_is_group(file, "/batches")) {
        HAPT_TRY(hapt_h5_list(file, "/batches", MOST_INPUTS, arena, &fields, &field));
        for (int64_t f = 0; f < fields; f++) {
            char name[512];
            snprintf(name, sizeof name, "/batches/%s", field[f]);
            HAPT_TRY(hapt_h5_shape(file, name, &dims, shape));
        }
        describe(finding, "%" PRId64 " named inputs in /batches", fields);
        return HAPT_OK;
    }
    const char *name = hapt_h5_exists(file, "/images") ? "/images" : "/batches";
    HAPT_TRY(hapt_h5_shape(file, name, &dims, shape));
    describe(finding, "%s of %" PRId64 " %s", name, dims > 0 ? shape[0] : 1,
             strcmp(name, "/images") == 0 && dims == 4 ? "images" : "steps");
    return HAPT_OK;
}

static enum hapt_status check_data(const char *path, struct hapt_arena *arena, struct finding *finding)
{
    struct hapt_h5 *file;
    HAPT_TRY(hapt_h5_open(path, NULL, 1, true, &file));
    const enum hapt_status status = check_open_data(file, arena, finding);
    hapt_h5_close(file);
    return status;
}

static enum hapt_status check_weights(const char *path, struct hapt_arena *arena, struct finding *finding)
{
    struct hapt_h5 *file;
    const char **name;
    int64_t count = 0;
    HAPT_TRY(hapt_h5_open(path, NULL, 1, true, &file));
    const enum hapt_status status = hapt_h5_list(file, "/parameters", INT32_MAX, arena, &count, &name);
    hapt_h5_close(file);
    describe(finding, "%" PRId64 " names in /parameters", count);
    return status;
}

static enum hapt_status check_shard(const char *path, struct hapt_arena *arena, struct finding *finding)
{
    HAPT_TRY(check_weights(path, arena, finding));
    describe(finding, "part of a checkpoint: give its folder to compare it with the manifest");
    return HAPT_OK;
}

static enum hapt_status check_manifest(const char *path, struct hapt_arena *arena, struct finding *finding)
{
    (void)path, (void)arena;
    describe(finding, "part of a checkpoint: give its folder to check the shards");
    return HAPT_OK;
}

/* `version`: the newest that is read. `member`: identifies a file without a format, written by another program; NULL:
 * no such files. */
static const struct kind {
    const char *format;
    int version;
    const char *member;
    enum hapt_status (*check)(const char *path, struct hapt_arena *arena, struct finding *finding);
} kinds[] = {
    {"hapt-model", HAPT_MODEL_VERSION, NULL, check_model},
    {"hapt-profile", 1, "/cluster_0", check_profile},
    {"hapt-efficiency", 1, NULL, check_efficiency},
    {"hapt-plan", HAPT_PLAN_VERSION, NULL, check_plan},
    {"hapt-run", 1, NULL, check_run},
    {"hapt-topology", 1, NULL, check_topology},
    {"hapt-weights", 1, "/parameters", check_weights},
    {"hapt-data", 1, "/tokens", check_data},
    {"hapt-data", 1, "/batches", check_data},
    {"hapt-data", 1, "/images", check_data},
    {"hapt-checkpoint", HAPT_CHECKPOINT_VERSION, NULL, check_manifest},
    {"hapt-checkpoint-shard", 1, NULL, check_shard},
};

/* ---- Files ---- */

static enum hapt_status refuse_foreign(struct finding *finding, const char *path, const char *what)
{
    finding->state = "foreign";
    return hapt_fail(HAPT_ERR_INPUT, "hapt help check lists the kinds", "%s is %s", path, what);
}

static const struct kind *find_kind(struct hapt_h5 *file, const char *format)
{
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        if (format ? !strcmp(kinds[k].format, format) : kinds[k].member && hapt_h5_exists(file, kinds[k].member))
            return &kinds[k];
    return NULL;
}

static enum hapt_status identify(struct hapt_h5 *file, struct hapt_arena *arena, struct finding *finding,
                                 const struct kind **kind)
{
    const char *format = NULL, *path = hapt_h5_path(file);
    if (hapt_h5_has_attribute(file, "/", "format"))
        HAPT_TRY(hapt_h5_read_attribute_text(file, "/", "format", arena, &format));
    *kind = find_kind(file, format);
    if (!*kind)
        return refuse_foreign(finding, path,
                              format ? "an HDF5 file of a format that hapt does not know"
                                     : "an HDF5 file of another maker");
    snprintf(finding->kind, sizeof finding->kind, "%s%s", (*kind)->format, format ? "" : " (of another maker)");
    if (format && hapt_h5_has_attribute(file, "/", "version"))
        HAPT_TRY(hapt_h5_read_attribute_int(file, "/", "version", &finding->version));
    if (finding->version <= (*kind)->version) return HAPT_OK;
    finding->state = "newer";
    return hapt_fail(HAPT_ERR_INPUT, "use a newer hapt", "%s has version %" PRId64 ", this hapt reads up to %d", path,
                     finding->version, (*kind)->version);
}

static enum hapt_status check_hdf5(const char *path, struct hapt_arena *arena, struct finding *finding)
{
    struct hapt_h5 *file;
    struct hapt_h5_content content;
    const struct kind *kind = NULL;
    char size[32];
    HAPT_TRY(hapt_h5_open(path, NULL, 0, true, &file));
    enum hapt_status status = identify(file, arena, finding, &kind);
    if (status == HAPT_OK) status = hapt_h5_verify(file, &content);
    hapt_h5_close(file);
    if (status == HAPT_OK) status = kind->check(path, arena, finding);
    HAPT_TRY(status);
    const size_t length = strlen(finding->holds);
    snprintf(finding->holds + length, sizeof finding->holds - length, "; %" PRId64 " datasets, %s", content.datasets,
             hapt_units_bytes((double)content.bytes, size));
    return HAPT_OK;
}

/* A JSON file is a cluster file or a timeline. */
static enum hapt_status check_json(const char *path, struct hapt_arena *arena, struct finding *finding)
{
    json_error_t error;
    json_t *root = json_load_file(path, JSON_REJECT_DUPLICATES, &error);
    const char *format = json_string_value(json_object_get(root, "format"));
    const json_t *version = json_object_get(root, "version"), *events = json_object_get(root, "traceEvents");
    const bool is_cluster = format && !strcmp(format, "hapt-cluster"), is_timeline = json_is_array(events);
    const size_t count = json_array_size(events);
    if (is_cluster) finding->version = json_integer_value(version);
    json_decref(root);
    if (!root)
        return hapt_fail(HAPT_ERR_INPUT, "use another copy or create it again", "%s: line %d: %s", path,
                         error.line > 0 ? error.line : 1, error.text);
    if (is_cluster) {
        snprintf(finding->kind, sizeof finding->kind, "hapt-cluster");
        if (finding->version > 1) finding->state = "newer";
        return check_cluster(path, arena, finding);
    }
    if (!is_timeline) return refuse_foreign(finding, path, "a JSON file of another maker");
    snprintf(finding->kind, sizeof finding->kind, "timeline");
    describe(finding, "%zu events", count);
    return HAPT_OK;
}

/* The first bytes tell HDF5 and JSON files from others. */
static enum hapt_status check_file(const char *path, struct hapt_arena *arena, struct finding *finding)
{
    unsigned char head[64] = {0};
    FILE *stream = fopen(path, "rb");
    if (!stream && (errno == ENOENT || errno == ENOTDIR)) {
        finding->state = "missing";
        return hapt_fail(HAPT_ERR_INPUT, "check the path", "cannot open %s: %s", path, strerror(errno));
    }
    if (!stream)
        return hapt_fail(errno == ENOMEM ? HAPT_ERR_MEMORY : HAPT_ERR_IO, "check permissions", "cannot open %s: %s",
                         path, strerror(errno));
    const size_t bytes = fread(head, 1, sizeof head, stream);
    const int error = ferror(stream) ? errno : 0;
    fclose(stream);
    if (error) return hapt_fail(HAPT_ERR_IO, NULL, "cannot read %s: %s", path, strerror(error));
    size_t at = 0;
    while (at < bytes && strchr(" \t\r\n", head[at]) && head[at]) at++;
    if (at < bytes && head[at] == '{') return check_json(path, arena, finding);
    const char *name = strrchr(path, '.');
    /* A file named .h5 without the HDF5 signature is damaged, not foreign. */
    if (memcmp(head, "\211HDF\r\n\032\n", 8) == 0 || (name && !strcmp(name, ".h5")))
        return check_hdf5(path, arena, finding);
    return refuse_foreign(finding, path, bytes == 0 ? "empty" : "neither HDF5 nor JSON");
}

static enum hapt_status check_checkpoint(const char *path, struct finding *finding)
{
    struct hapt_checkpoint_content content;
    char size[32];
    snprintf(finding->kind, sizeof finding->kind, "hapt-checkpoint");
    const enum hapt_status status = hapt_checkpoint_verify(path, &content);
    finding->version = content.version > 0 ? content.version : 1;
    HAPT_TRY(status);
    describe(finding,
             "step %" PRId64 ", %" PRId64 " parameters and %" PRId64 " states of each that trains in %" PRId64
             " shards, %s",
             content.step, content.parameters, content.states, content.shards,
             hapt_units_bytes((double)content.bytes, size));
    return HAPT_OK;
}

/* ---- Output ---- */

static const char *state_of(const struct finding *finding)
{
    if (finding->status == HAPT_OK) return "good";
    if (finding->status != HAPT_ERR_INPUT) return "unreadable";
    if (finding->state) return finding->state;
    switch (hapt_h5_last_fault()) {
    case HAPT_H5_FAULT_MISSING: return "missing";
    case HAPT_H5_FAULT_NEWER: return "newer";
    case HAPT_H5_FAULT_FOREIGN: return "foreign";
    case HAPT_H5_FAULT_SYSTEM: return "unreadable";
    default: return "damaged";
    }
}

static void print_finding(struct totals *totals, const char *path, const struct finding *finding)
{
    char version[32] = "";
    const bool good = finding->status == HAPT_OK;
    totals->checked++;
    if (!good) totals->bad++;
    if (!good && finding->status != HAPT_ERR_INPUT && totals->system == HAPT_OK) totals->system = finding->status;
    if (totals->files) {
        json_array_append_new(totals->files,
                              json_pack("{s:s, s:s, s:s, s:I, s:s, s:s}", "path", path, "state", finding->state, "kind",
                                        finding->kind, "version", (json_int_t)finding->version, "holds", finding->holds,
                                        "message", finding->message));
        return;
    }
    if (finding->version > 0) snprintf(version, sizeof version, " version %" PRId64, finding->version);
    hapt_print(totals->env, "%s: %s: %s%s%s%s\n", path, finding->state, finding->kind, version,
               finding->kind[0] ? ": " : "", good ? finding->holds : finding->message);
}

static void check_one(struct totals *totals, const char *path, bool is_checkpoint)
{
    struct hapt_arena arena;
    struct finding finding = {0};
    hapt_arena_init(&arena);
    finding.status = is_checkpoint ? check_checkpoint(path, &finding) : check_file(path, &arena, &finding);
    finding.state = state_of(&finding);
    snprintf(finding.message, sizeof finding.message, "%s", hapt_fail_message());
    hapt_fail_reset();
    print_finding(totals, path, &finding);
    hapt_arena_release(&arena);
}

static bool has_file(const char *folder, const char *name, struct hapt_arena *arena)
{
    struct stat about;
    const char *path = hapt_arena_printf(arena, "%s/%s", folder, name);
    return path && stat(path, &about) == 0 && S_ISREG(about.st_mode);
}

static int is_step(const struct dirent *entry)
{
    return strncmp(entry->d_name, "step-", 5) == 0 &&
           strspn(entry->d_name + 5, "0123456789") == strlen(entry->d_name + 5);
}

/* Checks the run file and the checkpoints of a run; other files in the folder are not hapt's. */
static void check_run_folder(struct totals *totals, const char *path, struct hapt_arena *arena)
{
    struct dirent **entry = NULL;
    const char *inner = hapt_arena_printf(arena, "%s/checkpoints", path);
    const bool run = has_file(path, "run.h5", arena);
    if (run) check_one(totals, hapt_arena_printf(arena, "%s/run.h5", path), false);
    int count = inner ? scandir(inner, &entry, is_step, alphasort) : 0;
    if (count < 0 && errno == ENOENT) inner = path, count = scandir(path, &entry, is_step, alphasort);
    if (count < 0) {
        struct finding finding = {.state = "unreadable", .status = errno == ENOMEM ? HAPT_ERR_MEMORY : HAPT_ERR_IO};
        snprintf(finding.message, sizeof finding.message, "%s cannot be listed: %s", inner ? inner : path,
                 strerror(errno));
        print_finding(totals, inner ? inner : path, &finding);
        return;
    }
    for (int i = 0; i < count; i++) {
        const char *checkpoint = hapt_arena_printf(arena, "%s/%s", inner, entry[i]->d_name);
        if (checkpoint) check_one(totals, checkpoint, true);
        free(entry[i]);
    }
    free(entry);
    if (run || count > 0) return;
    struct finding finding = {.state = "foreign", .status = HAPT_ERR_INPUT};
    snprintf(finding.message, sizeof finding.message, "%s is a folder that holds neither a run nor a checkpoint", path);
    print_finding(totals, path, &finding);
}

static void check_path(struct totals *totals, const char *path, struct hapt_arena *arena)
{
    struct stat about;
    if (stat(path, &about) != 0 || !S_ISDIR(about.st_mode))
        check_one(totals, path, false);
    else if (has_file(path, "manifest.h5", arena))
        check_one(totals, path, true);
    else
        check_run_folder(totals, path, arena);
}

static enum hapt_status conclude(const struct totals *totals)
{
    if (totals->files) {
        json_t *root = json_pack("{s:s, s:i, s:b, s:O}", "format", "hapt-check", "version", 1, "good", totals->bad == 0,
                                 "files", totals->files);
        HAPT_TRY(hapt_json_print(root, "the result's", 2));
    }
    if (totals->bad == 0) return HAPT_OK;
    if (totals->system != HAPT_OK)
        return hapt_fail(totals->system, "try again with enough memory, open files and disk space",
                         "some of %d files cannot be read", totals->checked);
    return hapt_fail(HAPT_ERR_INPUT, "see the lines above for the reason; use another copy, or create it again",
                     "%d of %d files %s not good", totals->bad, totals->checked, totals->bad == 1 ? "is" : "are");
}

static enum hapt_status check_words(struct hapt_env *env, const struct hapt_config *config, struct hapt_arena *arena)
{
    struct totals totals = {.env = env, .files = env->quiet ? json_array() : NULL};
    if (hapt_config_word_count(config) == 0)
        return hapt_fail(HAPT_ERR_USAGE, "hapt check model.h5 outputs/gpt", "hapt check needs files to check");
    for (int w = 0; w < hapt_config_word_count(config); w++) check_path(&totals, hapt_config_word(config, w), arena);
    const enum hapt_status status = conclude(&totals);
    json_decref(totals.files);
    return status;
}

enum hapt_status hapt_command_check(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena)
{
    return hapt_env_agree(env->world, env->world_rank == 0 ? check_words(env, config, arena) : HAPT_OK);
}
