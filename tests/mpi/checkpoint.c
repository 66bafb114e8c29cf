/* ranks: 1 2 3
 * Runs beside others: it measures no time.
 * Checkpoints. A written checkpoint can be read back. Damage of every kind is noticed, and the checkpoint before it is
 * used. A write that fails leaves older checkpoints intact. */
#include "test.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../../src/train/saving.h"

enum { ELEMENTS = 300, PARAMETERS = 5 };

static char root[256];
static struct hapt_arena arena;
static struct hapt_plan *plan;
static struct hapt_config *config;
static const char *const name[PARAMETERS] = {"wte.weight", "h.0.a.b", "h.0.c", "h.1.a", "lm_head.weight"};

/* One synchronous save. *path: the folder written. */
static enum hapt_status save_now(const struct hapt_env *env, const struct hapt_checkpoint_writer *writer, int64_t step,
                                 const struct hapt_history *history, const char **path)
{
    struct hapt_arena scratch;
    struct saving saving;
    bool done;
    hapt_arena_init(&scratch);
    enum hapt_status status = hapt_env_agree(env->world, saving_open(&saving, env, writer, &scratch));
    if (status == HAPT_OK) status = saving_begin(&saving, step, history, false);
    if (status == HAPT_OK) status = saving_finish(&saving, &done);
    if (status == HAPT_OK) *path = checkpoint_folder(&arena, writer->folder, step);
    hapt_arena_release(&scratch);
    return status;
}

static float value(int parameter, int state, int64_t step, int i)
{
    return (float)(parameter * 1000 + (state + 1) * 100 + i) * 0.5f + (float)step;
}

struct content {
    int64_t step;
    int shard, shards;
};

static enum hapt_status write_value(struct hapt_h5 *file, int parameter, int state, int64_t step)
{
    float data[ELEMENTS];
    const int64_t shape[2] = {3, ELEMENTS / 3};
    char dataset[64];
    for (int i = 0; i < ELEMENTS; i++) data[i] = value(parameter, state, step, i);
    snprintf(dataset, sizeof dataset, state < 0 ? "/parameters/%s" : "/state%2$d/%1$s", name[parameter], state);
    return hapt_h5_write(file, dataset, HAPT_H5_F32, 2, shape, data, "");
}

static enum hapt_status write_shard(void *context, struct hapt_h5 *file)
{
    const struct content *content = context;
    for (int p = content->shard; p < PARAMETERS; p += content->shards)
        for (int state = -1; state < 2; state++) HAPT_TRY(write_value(file, p, state, content->step));
    return HAPT_OK;
}

static int64_t resumed = -1; /* belongs to the run that saves */

static enum hapt_status save(const char *folder, int64_t step, int64_t keep, const char **path)
{
    const int shards = test_env.world_size < 2 ? 1 : 2, shard = test_env.world_rank < shards ? test_env.world_rank : -1;
    struct content content = {.step = step, .shard = shard, .shards = shards};
    int32_t place[PARAMETERS];
    double curve[100];
    for (int i = 0; i < 100; i++) curve[i] = 1.0 / (i + 1);
    for (int p = 0; p < PARAMETERS; p++) place[p] = p % shards;
    const struct hapt_history history = {
        .count = step, .loss = curve, .gradient_norm = curve, .learning_rate = curve, .time_s = curve};
    const struct hapt_checkpoint_writer writer = {.folder = folder,
                                                  .keep = keep,
                                                  .resumed_step = resumed,
                                                  .patience_s = 60,
                                                  .shard_count = shards,
                                                  .shard = shard,
                                                  .parameter_count = PARAMETERS,
                                                  .parameter = (const char **)name,
                                                  .parameter_shard = place,
                                                  .state_count = 2,
                                                  .plan = plan,
                                                  .config = config,
                                                  .write_shard = write_shard,
                                                  .context = &content};
    return save_now(&test_env, &writer, step, &history, path);
}

static void check_content(const struct hapt_checkpoint *checkpoint, int64_t step)
{
    CHECK(checkpoint->step == step && checkpoint->state_count == 2 && checkpoint->parameter_count == PARAMETERS);
    CHECK(checkpoint->plan->stage_count == plan->stage_count && checkpoint->plan->microbatches == plan->microbatches);
    CHECK(checkpoint->history.count == step && (step == 0 || checkpoint->history.loss[step - 1] == 1.0 / (double)step));
    for (int p = 0; p < PARAMETERS; p++)
        for (int state = -1; state < 2; state++) {
            float data[ELEMENTS];
            long wrong = 0;
            CHECK_OK(hapt_checkpoint_read(checkpoint, name[p], state, ELEMENTS, data));
            for (int i = 0; i < ELEMENTS; i++) wrong += data[i] != value(p, state, step, i);
            CHECK_MESSAGE(wrong == 0, "%ld values of %s wrong", wrong, name[p]);
        }
}

static bool there(const char *path)
{
    struct stat about;
    return stat(path, &about) == 0;
}

static void round_trip(void)
{
    const char *folder = hapt_arena_printf(&arena, "%s/a/checkpoints", root), *path = NULL;
    for (int64_t step = 0; step < 5; step++) CHECK_OK(save(folder, step, 2, &path));
    CHECK(!there(hapt_arena_printf(&arena, "%s/step-00000002", folder)));
    CHECK(there(hapt_arena_printf(&arena, "%s/step-00000003", folder)));
    const char *const ways[] = {hapt_arena_printf(&arena, "%s/a", root), folder, path};
    for (int w = 0; w < 3; w++) {
        struct hapt_checkpoint *checkpoint = NULL;
        CHECK_OK(hapt_checkpoint_find(&test_env, ways[w], &arena, &checkpoint));
        if (checkpoint) check_content(checkpoint, 4);
    }
    struct hapt_checkpoint *checkpoint = NULL;
    CHECK_OK(hapt_checkpoint_find(&test_env, path, &arena, &checkpoint));
    float data[ELEMENTS];
    CHECK_FAILS(hapt_checkpoint_read(checkpoint, "nobody", -1, ELEMENTS, data), HAPT_ERR_INPUT);
    CHECK_FAILS(hapt_checkpoint_read(checkpoint, name[0], 2, ELEMENTS, data), HAPT_ERR_INPUT);
    CHECK_FAILS(hapt_checkpoint_read(checkpoint, name[0], -1, ELEMENTS - 3, data), HAPT_ERR_INPUT);
    /* The options of the run become the defaults of the resumed run. */
    struct hapt_config *fresh = NULL;
    const char *argv[] = {"hapt", "train", "--beta1", "0.3"};
    CHECK_OK(hapt_config_parse(4, (char **)argv, &arena, &fresh));
    CHECK_OK(hapt_checkpoint_defaults(checkpoint, fresh));
    CHECK(hapt_config_real(fresh, "learning-rate") == 0.125 && hapt_config_real(fresh, "beta1") == 0.3);
    CHECK(hapt_config_int(fresh, "steps") == 77 && !hapt_config_given(fresh, "steps"));
    /* The run restarts from an earlier step. Checkpoints of later steps keep their files under another name. */
    resumed = 3;
    CHECK_OK(save(folder, 3, 2, &path));
    resumed = -1;
    CHECK(!there(hapt_arena_printf(&arena, "%s/step-00000004", folder)));
    CHECK(there(hapt_arena_printf(&arena, "%s/step-00000004.foreign/manifest.h5", folder)));
    CHECK_OK(hapt_checkpoint_find(&test_env, folder, &arena, &checkpoint));
    check_content(checkpoint, 3);
}

static void export_weights(void)
{
    struct hapt_checkpoint *checkpoint = NULL;
    const char *output = hapt_arena_printf(&arena, "%s/w.h5", root);
    CHECK_OK(hapt_checkpoint_find(&test_env, hapt_arena_printf(&arena, "%s/a", root), &arena, &checkpoint));
    if (!checkpoint || test_env.world_rank != 0) return;
    CHECK_OK(hapt_checkpoint_export(checkpoint, output));
    struct hapt_h5 *file = NULL;
    CHECK_OK(hapt_h5_open(output, NULL, 1, true, &file));
    for (int p = 0; p < PARAMETERS; p++) {
        int64_t shape[2] = {-1, -1};
        float *data = NULL;
        CHECK_OK(hapt_h5_read(file, hapt_arena_printf(&arena, "/parameters/%s", name[p]), HAPT_H5_F32, 2, shape,
                              ELEMENTS, &arena, (void **)&data));
        CHECK(shape[0] == 3 && data && data[ELEMENTS - 1] == value(p, -1, checkpoint->step, ELEMENTS - 1));
    }
    hapt_h5_close(file);
}

static void flip(const char *path, long where)
{
    FILE *file = fopen(path, "r+b");
    if (!CHECK(file != NULL)) return;
    fseek(file, 0, SEEK_END);
    where %= ftell(file);
    fseek(file, where, SEEK_SET);
    const int byte = fgetc(file);
    fseek(file, where, SEEK_SET);
    fputc(byte ^ (1 << (where % 8)), file);
    fclose(file);
}

enum damage {
    FLIP_SHARD,
    TRUNCATE_SHARD,
    NO_SHARD,
    NO_MANIFEST,
    TRUNCATE_MANIFEST,
    FLIP_MANIFEST,
    DAMAGES = FLIP_MANIFEST + 12
};

static void spoil(int damage, const char *path)
{
    const char *shard = hapt_arena_printf(&arena, "%s/shard-0000.h5", path);
    const char *manifest = hapt_arena_printf(&arena, "%s/manifest.h5", path);
    uint64_t random = (uint64_t)damage;
    switch (damage) {
    case FLIP_SHARD: flip(shard, 2500); break;
    case TRUNCATE_SHARD: CHECK(truncate(shard, 1000) == 0); break;
    case NO_SHARD: CHECK(unlink(shard) == 0); break;
    case NO_MANIFEST: CHECK(unlink(manifest) == 0); break;
    case TRUNCATE_MANIFEST: CHECK(truncate(manifest, 700) == 0); break;
    default: flip(manifest, (long)(hapt_random_next(&random) >> 20)); break;
    }
}

static void damage(void)
{
    const char *path = NULL;
    for (int d = 0; d < DAMAGES; d++) {
        struct hapt_checkpoint *checkpoint = NULL;
        const char *folder = hapt_arena_printf(&arena, "%s/b%d/checkpoints", root, d);
        CHECK_OK(save(folder, 1, 3, &path));
        CHECK_OK(save(folder, 2, 3, &path));
        if (test_env.world_rank == 0) spoil(d, path);
        MPI_Barrier(test_env.world);
        CHECK_OK(hapt_checkpoint_find(&test_env, folder, &arena, &checkpoint));
        /* A flipped bit in unused space of the manifest is harmless. Then the content must be intact. */
        if (!checkpoint) continue;
        if (d < FLIP_MANIFEST) CHECK_MESSAGE(checkpoint->step == 1, "damage %d passed unnoticed", d);
        check_content(checkpoint, checkpoint->step);
        MPI_Barrier(test_env.world);
        if (d < FLIP_MANIFEST && d != NO_MANIFEST) {
            struct hapt_checkpoint *bad = NULL;
            CHECK(hapt_checkpoint_find(&test_env, path, &arena, &bad) == HAPT_ERR_INPUT);
            hapt_fail_reset();
        }
    }
}

static void nothing_there(void)
{
    struct hapt_checkpoint *checkpoint = NULL;
    CHECK(hapt_checkpoint_find(&test_env, hapt_arena_printf(&arena, "%s/nowhere", root), &arena, &checkpoint) ==
          HAPT_ERR_INPUT);
    hapt_fail_reset();
}

/* One rank has a full disk (a limit on file sizes). All ranks report failure, and the older checkpoint stays. */
static void full_disk(void)
{
    const char *folder = hapt_arena_printf(&arena, "%s/c/checkpoints", root), *path = NULL;
    CHECK_OK(save(folder, 1, 1, &path));
    struct rlimit before;
    struct hapt_checkpoint *checkpoint = NULL;
    getrlimit(RLIMIT_FSIZE, &before);
    signal(SIGXFSZ, SIG_IGN);
    /* Each point at which a write can fail: the new file, a table, the last flush. */
    for (rlim_t bytes = 0; bytes < 9000; bytes += 500) {
        const struct rlimit small = {bytes, before.rlim_max};
        if (test_env.world_rank == test_env.world_size - 1 || test_env.world_size == 3) setrlimit(RLIMIT_FSIZE, &small);
        const enum hapt_status status = save(folder, 2, 1, &path);
        setrlimit(RLIMIT_FSIZE, &before);
        CHECK(status == HAPT_ERR_IO);
        hapt_fail_reset();
        CHECK_OK(hapt_checkpoint_find(&test_env, folder, &arena, &checkpoint));
        if (checkpoint) check_content(checkpoint, 1);
    }
    CHECK_OK(save(folder, 2, 1, &path));
    CHECK_OK(hapt_checkpoint_find(&test_env, folder, &arena, &checkpoint));
    if (checkpoint) check_content(checkpoint, 2);
    /* The checkpoint of lowest loss is kept beside the newest, whose loss is not known yet. This is the first
     * checkpoint, then the second, because the loss falls. */
    CHECK(there(hapt_arena_printf(&arena, "%s/step-00000001", folder)));
    CHECK_OK(save(folder, 3, 1, &path));
    CHECK(there(hapt_arena_printf(&arena, "%s/step-00000002", folder)) &&
          !there(hapt_arena_printf(&arena, "%s/step-00000001", folder)));
}

/* ---- Constant shards: the last parameter is frozen. ---- */

static enum hapt_status write_first(void *context, struct hapt_h5 *file)
{
    const struct content *content = context;
    for (int p = 0; p < PARAMETERS - 1; p++)
        for (int state = -1; state < 2; state++) HAPT_TRY(write_value(file, p, state, content->step));
    return HAPT_OK;
}

static int constant_writes;

static enum hapt_status write_last(void *context, struct hapt_h5 *file)
{
    (void)context;
    constant_writes++;
    return write_value(file, PARAMETERS - 1, -1, 0);
}

static enum hapt_status save_constant(const char *folder, int64_t step, struct hapt_checkpoint_constant *constant)
{
    const bool writes = test_env.world_rank == 0;
    struct content content = {.step = step};
    int32_t place[PARAMETERS] = {0}, states[PARAMETERS];
    double curve[100] = {0};
    const char *path;
    for (int p = 0; p < PARAMETERS; p++) states[p] = p < PARAMETERS - 1 ? 2 : 0;
    place[PARAMETERS - 1] = 1;
    const struct hapt_history history = {
        .count = step, .loss = curve, .gradient_norm = curve, .learning_rate = curve, .time_s = curve};
    const struct hapt_checkpoint_writer writer = {.folder = folder,
                                                  .keep = 1,
                                                  .resumed_step = -1,
                                                  .patience_s = 60,
                                                  .shard_count = 2,
                                                  .shard = writes ? 0 : -1,
                                                  .constant_shard = writes ? 1 : -1,
                                                  .parameter_count = PARAMETERS,
                                                  .parameter = (const char **)name,
                                                  .parameter_shard = place,
                                                  .parameter_states = states,
                                                  .state_count = 2,
                                                  .plan = plan,
                                                  .config = config,
                                                  .write_shard = write_first,
                                                  .write_constant = write_last,
                                                  .constant = constant,
                                                  .context = &content};
    const enum hapt_status status = save_now(&test_env, &writer, step, &history, &path);
    constant->linked = constant->linked || (status == HAPT_OK && constant->links);
    return status;
}

static ino_t constant_file(const char *folder, int64_t step)
{
    struct stat about = {0};
    CHECK(stat(checkpoint_shard_path(&arena, checkpoint_folder(&arena, folder, step), 1), &about) == 0);
    return about.st_ino;
}

static void check_constant(const char *folder, int64_t step)
{
    struct hapt_checkpoint *checkpoint = NULL;
    struct hapt_checkpoint_content content;
    CHECK_OK(hapt_checkpoint_find(&test_env, folder, &arena, &checkpoint));
    if (!checkpoint) return;
    CHECK(checkpoint->step == step);
    for (int p = 0; p < PARAMETERS; p++)
        for (int state = -1; state < 2; state++) {
            const bool last = p == PARAMETERS - 1;
            const struct hapt_rows row = {.total = 3, .first = 1, .count = 1};
            float data[ELEMENTS], part[ELEMENTS / 3];
            long wrong = 0;
            CHECK_OK(hapt_checkpoint_read(checkpoint, name[p], state, ELEMENTS, data));
            CHECK_OK(hapt_checkpoint_read_rows(checkpoint, name[p], state, ELEMENTS, &row, part));
            for (int i = 0; i < ELEMENTS; i++)
                wrong += data[i] != (last && state >= 0 ? 0 : value(p, state, last ? 0 : step, i));
            CHECK_MESSAGE(wrong == 0, "%ld values of %s wrong", wrong, name[p]);
            CHECK(!memcmp(part, data + ELEMENTS / 3, sizeof part));
        }
    CHECK_OK(hapt_checkpoint_verify(checkpoint->path, &content));
    CHECK(content.shards == 2 && content.parameters == PARAMETERS);
}

/* Constant shards are written once; the next checkpoints have the same file, also when the one before is removed. */
static void constants(void)
{
    const char *folder = hapt_arena_printf(&arena, "%s/d/checkpoints", root);
    struct hapt_checkpoint_constant constant = {.links = true};
    for (int64_t step = 1; step <= 4; step++) {
        CHECK_OK(save_constant(folder, step, &constant));
        check_constant(folder, step);
        static ino_t first;
        const ino_t file = constant_file(folder, step);
        if (step == 1) first = file;
        CHECK(file == first && constant_writes == (test_env.world_rank == 0));
        MPI_Barrier(test_env.world);
    }
    /* The newest checkpoint is moved away: the next one has the file all the same. */
    const ino_t file = constant_file(folder, 4);
    MPI_Barrier(test_env.world);
    if (test_env.world_rank == 0)
        CHECK(rename(checkpoint_folder(&arena, folder, 4), hapt_arena_printf(&arena, "%s/elsewhere", root)) == 0);
    MPI_Barrier(test_env.world);
    CHECK_OK(save_constant(folder, 5, &constant));
    CHECK(constant_file(folder, 5) == file);
    check_constant(folder, 5);
    /* Its own name is gone: one error, and what is there stays. */
    MPI_Barrier(test_env.world);
    if (test_env.world_rank == 0)
        CHECK(unlink(hapt_arena_printf(&arena, "%s/.constant-0001-%016llx.h5", folder,
                                       (unsigned long long)constant.checksum)) == 0);
    MPI_Barrier(test_env.world);
    CHECK(save_constant(folder, 6, &constant) == HAPT_ERR_IO);
    hapt_fail_reset();
    check_constant(folder, 5);
    /* Without links each checkpoint has its own file. */
    constant = (struct hapt_checkpoint_constant){0};
    CHECK_OK(save_constant(folder, 7, &constant));
    CHECK_OK(save_constant(folder, 8, &constant));
    check_constant(folder, 8);
    CHECK(constant_writes == (test_env.world_rank == 0 ? 3 : 0));
}

static void make_plan(void)
{
    plan = hapt_arena_alloc(&arena, 1, sizeof *plan);
    *plan = (struct hapt_plan){.microbatches = 4,
                               .schedule = HAPT_SCHEDULE_H1F1B,
                               .hide_threshold = 0.02,
                               .replicas = 1,
                               .layer_count = 2,
                               .threads = 1,
                               .t_max_s = 1,
                               .limit = "compute",
                               .latency_s = 1,
                               .simulated_s = 1,
                               .balance_eta = 1};
    CHECK_OK(hapt_plan_allot(plan, 2, &arena));
    for (int s = 0; s < 2; s++) {
        struct hapt_plan_stage *stage = &plan->stage[s];
        stage->layout = hapt_layout_plain(1);
        stage->first_layer = s;
        stage->end_layer = s + 1;
        stage->first_op = 3 * s;
        stage->end_op = 3 * s + 3;
        stage->submesh->nodes = stage->submesh->devices_per_node = 1;
        stage->submesh->part_name[0] = strcpy(stage->submesh->name, "a");
        stage->warmup = 2 - s;
        stage->compute_s = 1;
        stage->forward_s = 0.3;
        stage->parameter_bytes = stage->activation_bytes = 1;
        stage->memory_bytes = 3 - s;
        stage->device_memory_bytes = 1e9;
    }
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    hapt_arena_init(&arena);
    const char *words[] = {"hapt", "train", "--steps", "77", "--learning-rate", "0.125"};
    CHECK_OK(hapt_config_parse(6, (char **)words, &arena, &config));
    if (test_env.world_rank == 0) {
        snprintf(root, sizeof root, "/tmp/hapt-checkpoint-XXXXXX");
        CHECK(mkdtemp(root) != NULL);
    }
    MPI_Bcast(root, (int)sizeof root, MPI_CHAR, 0, test_env.world);
    make_plan();
    RUN(round_trip);
    RUN(export_weights);
    RUN(damage);
    RUN(nothing_there);
    RUN(full_disk);
    RUN(constants);
    MPI_Barrier(test_env.world);
    if (test_env.world_rank == 0 && system(hapt_arena_printf(&arena, "rm -rf %s", root)))
        fprintf(stderr, "rm failed\n");
    hapt_arena_release(&arena);
    return test_finish();
}
