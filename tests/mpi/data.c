/* ranks: 1 2 3
 * Runs beside others: it measures no time.
 * Data: rows depend on seed and step only. Given batches come in order. All ranks refuse a file that does not fit. */
#include "test.h"

#include <unistd.h>

#include "fixture.h"
#include "hapt/link.h"
#include "hapt/train.h"

enum { T = 8, ROWS = 6, STEPS = 5, TOKENS = 5000, VOCAB = 40 };

static char folder[256];
static struct hapt_arena arena;
static struct hapt_model *model;

static int32_t token_at(int64_t i)
{
    return (int32_t)((i * 7 + i / 13) % VOCAB);
}

static const char *path_of(const char *name)
{
    return hapt_arena_printf(&arena, "%s/%s.h5", folder, name);
}

/* One rank writes, all wait. */
static void write_file(const char *name, const char *dataset, int dims, const int64_t *shape, int64_t spoiled,
                       int32_t with)
{
    if (test_env.world_rank == 0) {
        int64_t count = 1;
        struct hapt_h5 *file = NULL;
        for (int d = 0; d < dims; d++) count *= shape[d];
        int32_t *token = malloc((size_t)count * sizeof *token);
        for (int64_t i = 0; i < count; i++) token[i] = i == spoiled ? with : token_at(i);
        CHECK_OK(hapt_h5_create(path_of(name), "hapt-data", 1, &file));
        CHECK_OK(hapt_h5_write(file, dataset, HAPT_H5_I32, dims, shape, token, ""));
        CHECK_OK(hapt_h5_commit(file));
        free(token);
    }
    MPI_Barrier(test_env.world);
}

static struct hapt_data *open_data(const char *name, int rows, uint64_t seed)
{
    struct hapt_data *data = NULL;
    CHECK_OK(
        hapt_data_open(&test_env, path_of(name), model, &(struct hapt_data_order){rows, STEPS, seed, false}, &data));
    if (!data) exit(1);
    return data;
}

static void exact_batches(void)
{
    const int64_t shape[3] = {STEPS + 1, ROWS, T + 1};
    write_file("batches", "/batches", 3, shape, -1, 0);
    struct hapt_data *data = open_data("batches", ROWS, 1);
    CHECK(hapt_data_targets(data, 0) == ROWS * T);
    for (int64_t step = 0; step < STEPS; step++)
        for (int first = 0; first < ROWS; first += 2) {
            int32_t inputs[2 * T], targets[2 * T];
            hapt_data_read(data, HAPT_ROLE_TOKENS, -1, step, first, 2, inputs);
            hapt_data_read(data, HAPT_ROLE_TARGETS, -1, step, first, 2, targets);
            for (int r = 0; r < 2; r++)
                for (int i = 0; i < T; i++) {
                    const int64_t at = (step * ROWS + first + r) * (T + 1) + i;
                    CHECK(inputs[r * T + i] == token_at(at) && targets[r * T + i] == token_at(at + 1));
                }
        }
    hapt_data_close(data);
}

/* Separate targets: -100 marks a position without a target, and only the other positions count. */
enum { WITH_TARGETS = STEPS * ROWS * T };

static int32_t target_at(int64_t i)
{
    return i % 7 == 0 || i / (ROWS * T) == 2 ? -100 : (int32_t)((i * 11) % VOCAB);
}

/* In step 2 all targets but one are -100; with `empty` all are. */
static void write_targets(const char *name, int64_t rows, int64_t width, bool empty, int32_t spoiled)
{
    if (test_env.world_rank == 0) {
        struct hapt_h5 *file = NULL;
        const int64_t shape[3] = {STEPS, ROWS, T}, targets[3] = {STEPS, rows, width};
        int32_t *token = malloc(WITH_TARGETS * sizeof *token);
        CHECK_OK(hapt_h5_create(path_of(name), "hapt-data", 1, &file));
        for (int64_t i = 0; i < WITH_TARGETS; i++) token[i] = token_at(i);
        CHECK_OK(hapt_h5_write(file, "/batches", HAPT_H5_I32, 3, shape, token, ""));
        for (int64_t i = 0; i < WITH_TARGETS; i++) token[i] = target_at(i);
        if (!empty) token[2 * ROWS * T + 5] = 3;
        if (spoiled) token[WITH_TARGETS - 1] = spoiled;
        CHECK_OK(hapt_h5_write(file, "/targets", HAPT_H5_I32, 3, targets, token, ""));
        CHECK_OK(hapt_h5_commit(file));
        free(token);
    }
    MPI_Barrier(test_env.world);
}

static void own_targets(void)
{
    write_targets("masked", ROWS, T, false, 0);
    struct hapt_data *data = open_data("masked", ROWS, 1);
    for (int64_t step = 0; step < STEPS; step++) {
        int32_t inputs[ROWS * T], targets[ROWS * T], one[T];
        int64_t count = 0;
        hapt_data_read(data, HAPT_ROLE_TOKENS, -1, step, 0, ROWS, inputs);
        hapt_data_read(data, HAPT_ROLE_TARGETS, -1, step, 0, ROWS, targets);
        for (int i = 0; i < ROWS * T; i++) {
            const int64_t at = step * ROWS * T + i;
            CHECK(inputs[i] == token_at(at) && targets[i] == (step == 2 && i == 5 ? 3 : target_at(at)));
            count += targets[i] != -100;
        }
        CHECK(hapt_data_targets(data, step) == count && (step != 2 || count == 1));
        hapt_data_read(data, HAPT_ROLE_TARGETS, -1, step, ROWS - 1, 1, one);
        CHECK(!memcmp(one, targets + (ROWS - 1) * T, sizeof one));
    }
    hapt_data_close(data);
}

static void streams(void)
{
    const int64_t shape[1] = {TOKENS};
    write_file("tokens", "/tokens", 1, shape, -1, 0);
    struct hapt_data *data = open_data("tokens", ROWS, 5), *same = open_data("tokens", 2 * ROWS, 5),
                     *other = open_data("tokens", ROWS, 6);
    int32_t first[T], inputs[ROWS * T], targets[ROWS * T], one[T];
    uint64_t fingerprint = 0;
    int equal = 0, repeated = 0;
    hapt_data_read(data, HAPT_ROLE_TOKENS, -1, 0, 0, 1, first);
    for (int64_t step = 0; step < STEPS; step++) {
        hapt_data_read(data, HAPT_ROLE_TOKENS, -1, step, 0, ROWS, inputs);
        hapt_data_read(data, HAPT_ROLE_TARGETS, -1, step, 0, ROWS, targets);
        fingerprint = hapt_hash(fingerprint, inputs, sizeof inputs);
        for (int r = 0; r < ROWS; r++) {
            CHECK(!memcmp(inputs + r * T + 1, targets + r * T, (T - 1) * sizeof *inputs));
            /* Any single row, also of a run with more rows per step. */
            hapt_data_read(same, HAPT_ROLE_TOKENS, -1, step, r, 1, one);
            CHECK(!memcmp(one, inputs + r * T, sizeof one));
            hapt_data_read(other, HAPT_ROLE_TOKENS, -1, step, r, 1, one);
            equal += !memcmp(one, inputs + r * T, sizeof one);
            repeated += !memcmp(first, inputs + r * T, sizeof first);
        }
    }
    CHECK(equal <= 3 && repeated <= 3); /* text repeats, but rows hardly do */
    uint64_t all[8];
    CHECK_OK(hapt_link_all_gather(test_env.world, "test", 60, &fingerprint, sizeof fingerprint, all));
    for (int r = 0; r < test_env.world_size; r++) CHECK(all[r] == fingerprint);
    hapt_data_close(data);
    hapt_data_close(same);
    hapt_data_close(other);
}

/* ---- stored types, targets and order of streams ---- */

static bool is_mapped(const char *name)
{
    char line[1024];
    bool found = false;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps && fgets(line, sizeof line, maps)) found = found || strstr(line, path_of(name));
    if (maps) fclose(maps);
    return found;
}

static void write_stream(const char *name, enum hapt_h5_type type, int64_t count, const int32_t *targets)
{
    if (test_env.world_rank == 0) {
        struct hapt_h5 *file = NULL;
        char *values = malloc((size_t)count * sizeof(double));
        for (int64_t i = 0; i < count; i++) switch (type) {
            case HAPT_H5_U8: ((uint8_t *)values)[i] = (uint8_t)token_at(i); break;
            case HAPT_H5_U16: ((uint16_t *)values)[i] = (uint16_t)token_at(i); break;
            case HAPT_H5_I32: ((int32_t *)values)[i] = token_at(i); break;
            case HAPT_H5_I64: ((int64_t *)values)[i] = token_at(i); break;
            case HAPT_H5_F32: ((float *)values)[i] = (float)token_at(i); break;
            case HAPT_H5_F64: ((double *)values)[i] = token_at(i); break;
            }
        CHECK_OK(hapt_h5_create(path_of(name), "hapt-data", 1, &file));
        CHECK_OK(hapt_h5_write(file, "/tokens", type, 1, &count, values, ""));
        if (targets) CHECK_OK(hapt_h5_write(file, "/targets", HAPT_H5_I32, 1, &count, targets, ""));
        CHECK_OK(hapt_h5_commit(file));
        free(values);
    }
    MPI_Barrier(test_env.world);
}

/* The same rows from each stored type, also across blocks of the file (2^18 tokens); integers are mapped. */
static void stored_types(void)
{
    enum { MANY = (1 << 19) + 1000 };
    static const char *const name[] = {"u8", "u16", "i32", "i64", "f32", "f64"};
    struct hapt_data_identity first, identity;
    for (int t = HAPT_H5_U8; t <= HAPT_H5_F64; t++) {
        write_stream(name[t], (enum hapt_h5_type)t, MANY, NULL);
        struct hapt_data *data = NULL;
        CHECK_OK(hapt_data_open_held_out(&test_env, path_of(name[t]), model, 100, 0, &data));
        if (!data) exit(1);
        CHECK(is_mapped(name[t]) == (t <= HAPT_H5_I64));
        CHECK(hapt_data_held_out_rows(data) == (MANY - 1) / T);
        int32_t inputs[T], targets[T];
        bool equal = true;
        for (int64_t row = 0; row < (MANY - 1) / T; row++) {
            hapt_data_read(data, HAPT_ROLE_TOKENS, -1, row / 100, (int)(row % 100), 1, inputs);
            hapt_data_read(data, HAPT_ROLE_TARGETS, -1, row / 100, (int)(row % 100), 1, targets);
            for (int i = 0; i < T; i++)
                equal = equal && inputs[i] == token_at(row * T + i) && targets[i] == token_at(row * T + i + 1);
        }
        CHECK_MESSAGE(equal, "%s", name[t]);
        hapt_data_identify(data, 0, &identity);
        if (t == HAPT_H5_U8) first = identity;
        uint16_t *narrow = malloc(MANY * sizeof *narrow);
        for (int64_t i = 0; i < MANY; i++) narrow[i] = (uint16_t)token_at(i);
        const uint64_t hash = hapt_hash(0, narrow, MANY * sizeof *narrow);
        CHECK(identity.checksum == (int64_t)hapt_hash_word(hash, hapt_data_held_out_rows(data)));
        CHECK(identity.checksum == first.checksum && identity.count == MANY);
        free(narrow);
        hapt_data_close(data);
        CHECK(!is_mapped(name[t]));
        data = open_data(name[t], ROWS, 1); /* in checkpoints of earlier versions, too */
        hapt_data_identify(data, 3, &identity);
        CHECK(identity.checksum == (int64_t)hash);
        hapt_data_close(data);
    }
}

/* /targets [n] beside /tokens [n]: rows of both begin at the same place; the last block of counts is a whole one. */
static void targets_of_streams(void)
{
    for (int n = 1023; n <= 1025; n++) {
        int32_t target[1025], inputs[ROWS * T], own[ROWS * T], same[ROWS * T];
        for (int i = 0; i < n; i++) target[i] = i % 5 == 0 || (i > 200 && i < 800) ? -100 : (i * 3) % VOCAB;
        write_stream("own-targets", HAPT_H5_U16, n, target);
        for (int epochs = 0; epochs < 2; epochs++) {
            struct hapt_data *data = NULL;
            CHECK_OK(hapt_data_open(&test_env, path_of("own-targets"), model,
                                    &(struct hapt_data_order){ROWS, STEPS, 3, epochs != 0}, &data));
            if (!data) exit(1);
            for (int64_t step = 0; step < 200; step++) {
                int64_t counted = 0;
                hapt_data_read(data, HAPT_ROLE_TOKENS, -1, step, 0, ROWS, inputs);
                hapt_data_read(data, HAPT_ROLE_TARGETS, -1, step, 0, ROWS, own);
                for (int r = 0; r < ROWS; r++) {
                    bool found = false; /* text repeats with a period of 520 */
                    for (int start = 0; start + T <= n && !found; start++) {
                        found = true;
                        for (int i = 0; i < T; i++) {
                            same[i] = target[start + i];
                            found = found && inputs[r * T + i] == token_at(start + i) && own[r * T + i] == same[i];
                        }
                    }
                    CHECK(found);
                    for (int i = 0; i < T; i++) counted += own[r * T + i] != -100;
                }
                CHECK(hapt_data_targets(data, step) == (counted > 0 ? counted : 1));
            }
            hapt_data_close(data);
        }
    }
    int32_t none[TOKENS];
    for (int i = 0; i < TOKENS; i++) none[i] = -100;
    write_stream("no-targets", HAPT_H5_U16, TOKENS, none);
}

/* With epochs each row comes once before the next epoch begins, whatever the rows of a step. */
static void epochs(void)
{
    enum { N = 8 * 37 + 6 }; /* 37 rows; the cuts move by up to 5 tokens */
    enum { PER_EPOCH = (N - 1) / T };
    int32_t token[N], row[T], other[T];
    int moved = 0, reordered = 0;
    int64_t start_before[PER_EPOCH] = {0};
    const int64_t shape[1] = {N};
    for (int i = 0; i < N; i++) token[i] = (int32_t)(hapt_hash_word(1, i) % VOCAB);
    if (test_env.world_rank == 0) {
        struct hapt_h5 *file = NULL;
        CHECK_OK(hapt_h5_create(path_of("epochs"), "hapt-data", 1, &file));
        CHECK_OK(hapt_h5_write(file, "/tokens", HAPT_H5_I32, 1, shape, token, ""));
        CHECK_OK(hapt_h5_commit(file));
    }
    MPI_Barrier(test_env.world);
    struct hapt_data *by6 = NULL, *by10 = NULL;
    CHECK_OK(hapt_data_open(&test_env, path_of("epochs"), model, &(struct hapt_data_order){6, 1, 9, true}, &by6));
    CHECK_OK(hapt_data_open(&test_env, path_of("epochs"), model, &(struct hapt_data_order){10, 1, 9, true}, &by10));
    if (!by6 || !by10) exit(1);
    for (int epoch = 0; epoch < 8; epoch++) {
        bool seen[PER_EPOCH] = {false};
        int shift = -1;
        for (int i = 0; i < PER_EPOCH; i++) {
            const int number = epoch * PER_EPOCH + i;
            hapt_data_read(by6, HAPT_ROLE_TOKENS, -1, number / 6, number % 6, 1, row);
            hapt_data_read(by10, HAPT_ROLE_TOKENS, -1, number / 10, number % 10, 1, other);
            CHECK(!memcmp(row, other, sizeof row));
            int start = 0;
            while (start + T < N && memcmp(token + start, row, sizeof row) != 0) start++;
            if (!CHECK(start + T < N)) break;
            if (shift < 0) shift = start % T;
            CHECK(start % T == shift && !seen[start / T]);
            seen[start / T] = true;
            reordered += start_before[i] != start / T;
            start_before[i] = start / T;
        }
        moved += shift > 0;
    }
    CHECK(moved > 0 && reordered > 8 * PER_EPOCH / 2);
    int64_t rows = 0;
    CHECK_OK(hapt_data_rows(&test_env, path_of("epochs"), model, &(struct hapt_data_order){6, 1, 9, true}, &rows));
    CHECK(rows == PER_EPOCH);
    hapt_data_close(by6);
    hapt_data_close(by10);
}

/* ---- images ---- */

enum { CHANNELS = 2, SIDE = 4, IMAGE = CHANNELS * SIDE * SIDE, STORED = 50, CLASSES = 3 };

static struct hapt_model *image_model(void)
{
    char *words[] = {"hapt", "model",    "vgg", "--image",  "4", "--channels",   "2", "--classes", "3", "--width",
                     "2",    "--hidden", "4",   "--stages", "1", "--microbatch", "2"};
    struct hapt_config *config = NULL;
    struct hapt_model *made = NULL;
    CHECK_OK(hapt_config_parse((int)(sizeof words / sizeof words[0]), words, &arena, &config));
    CHECK_OK(hapt_model_build("vgg", config, &arena, &made));
    if (!made) exit(1);
    return made;
}

static uint8_t pixel_at(int64_t i)
{
    return (uint8_t)(i * 37 % 251);
}

/* Labels [dims - 3] and images [dims], as bytes or floats. One label may be made invalid. */
static void write_images(const char *name, bool bytes, int dims, const int64_t *shape, bool normalised, int32_t spoiled)
{
    if (test_env.world_rank == 0) {
        struct hapt_h5 *file = NULL;
        int64_t count = 1, channels = CHANNELS;
        for (int d = 0; d < dims - 3; d++) count *= shape[d];
        uint8_t *pixel = malloc((size_t)(count * IMAGE));
        float *value = malloc((size_t)(count * IMAGE) * sizeof *value);
        int32_t *label = malloc((size_t)count * sizeof *label);
        for (int64_t i = 0; i < count * IMAGE; i++) pixel[i] = pixel_at(i), value[i] = (float)pixel_at(i) - 100.5f;
        for (int64_t i = 0; i < count; i++) label[i] = (int32_t)(i % CLASSES);
        if (spoiled) label[count - 1] = spoiled;
        CHECK_OK(hapt_h5_create(path_of(name), "hapt-data", 1, &file));
        CHECK_OK(hapt_h5_write(file, "/images", bytes ? HAPT_H5_U8 : HAPT_H5_F32, dims, shape,
                               bytes ? (void *)pixel : value, ""));
        CHECK_OK(hapt_h5_write(file, "/labels", HAPT_H5_I32, dims - 3, shape, label, ""));
        if (normalised) {
            CHECK_OK(hapt_h5_write(file, "/mean", HAPT_H5_F64, 1, &channels, (double[]){100, 50}, ""));
            CHECK_OK(hapt_h5_write(file, "/std", HAPT_H5_F64, 1, &channels, (double[]){4, 0.5}, ""));
        }
        CHECK_OK(hapt_h5_commit(file));
        free(pixel);
        free(value);
        free(label);
    }
    MPI_Barrier(test_env.world);
}

static void exact_images(void)
{
    const int64_t shape[5] = {STEPS, ROWS, CHANNELS, SIDE, SIDE};
    write_images("exact-images", false, 5, shape, false, 0);
    struct hapt_data *data = open_data("exact-images", ROWS, 1);
    for (int64_t step = 0; step < STEPS; step++)
        for (int first = 0; first < ROWS; first += 2) {
            float images[2 * IMAGE];
            int32_t labels[2];
            hapt_data_read(data, HAPT_ROLE_IMAGES, -1, step, first, 2, images);
            hapt_data_read(data, HAPT_ROLE_LABELS, -1, step, first, 2, labels);
            const int64_t row = step * ROWS + first;
            for (int i = 0; i < 2 * IMAGE; i++) CHECK(images[i] == (float)pixel_at(row * IMAGE + i) - 100.5f);
            CHECK(labels[0] == row % CLASSES && labels[1] == (row + 1) % CLASSES);
        }
    CHECK(hapt_data_targets(data, 0) == ROWS);
    hapt_data_close(data);
}

/* Rows of a stream are images of the file with their labels, for all ranks and batch sizes. Every image is drawn at
 * some time. */
static void streams_of_images(void)
{
    const int64_t shape[4] = {STORED, CHANNELS, SIDE, SIDE};
    bool drawn[STORED] = {false};
    int different = 0;
    for (int normalised = 0; normalised < 2; normalised++) {
        write_images("image-stream", true, 4, shape, normalised, 0);
        struct hapt_data *data = open_data("image-stream", ROWS * 10, 5);
        for (int64_t step = 0; step < STEPS; step++)
            for (int row = 0; row < ROWS * 10; row++) {
                float image[IMAGE];
                int32_t label;
                int64_t found = -1;
                hapt_data_read(data, HAPT_ROLE_IMAGES, -1, step, row, 1, image);
                hapt_data_read(data, HAPT_ROLE_LABELS, -1, step, row, 1, &label);
                for (int64_t n = 0; n < STORED && found < 0; n++) {
                    bool equal = n % CLASSES == label;
                    for (int i = 0; equal && i < IMAGE; i++) {
                        const float stored = pixel_at(n * IMAGE + i);
                        const bool second = i >= SIDE * SIDE;
                        const float value =
                            normalised ? (stored - (second ? 50 : 100)) / (second ? 0.5f : 4.0f) : stored / 255;
                        equal = fabsf(image[i] - value) <= 1e-6f * fabsf(value);
                    }
                    if (equal) found = n;
                }
                if (!CHECK(found >= 0)) break;
                different += !drawn[found];
                drawn[found] = true;
            }
        hapt_data_close(data);
    }
    CHECK(different == STORED);
}

static void refuse(const char *what, int rows)
{
    struct hapt_data *data = NULL;
    const enum hapt_status status =
        hapt_data_open(&test_env, path_of(what), model, &(struct hapt_data_order){rows, STEPS, 1, false}, &data);
    CHECK_MESSAGE(status == HAPT_ERR_INPUT && !data, "%s is not refused", what);
    hapt_fail_reset();
}

static void refusals(void)
{
    const int64_t good[3] = {STEPS, ROWS, T + 1}, few[3] = {STEPS - 1, ROWS, T + 1}, narrow[3] = {STEPS, ROWS, T};
    const int64_t stream[1] = {TOKENS}, tiny[1] = {T};
    write_file("few", "/batches", 3, few, -1, 0);
    write_file("narrow", "/batches", 3, narrow, -1, 0);
    write_file("flat", "/batches", 2, good, -1, 0);
    write_file("outside", "/batches", 3, good, 33, VOCAB);
    write_file("negative", "/tokens", 1, stream, TOKENS - 1, -1);
    write_file("tiny", "/tokens", 1, tiny, -1, 0);
    write_file("else", "/other", 1, stream, -1, 0);
    write_targets("empty", ROWS, T, true, 0);
    write_targets("shifted", ROWS, T - 1, false, 0);
    write_targets("fewer", ROWS - 1, T, false, 0);
    write_targets("target-outside", ROWS, T, false, VOCAB);
    write_targets("target-negative", ROWS, T, false, -1);
    refuse("empty", ROWS);
    refuse("shifted", ROWS);
    refuse("fewer", ROWS);
    refuse("target-outside", ROWS);
    refuse("target-negative", ROWS);
    refuse("batches", ROWS + 2);
    refuse("few", ROWS);
    refuse("narrow", ROWS);
    refuse("flat", ROWS);
    refuse("outside", ROWS);
    refuse("negative", ROWS);
    refuse("tiny", ROWS);
    refuse("else", ROWS);
    refuse("missing", ROWS);
    refuse("no-targets", ROWS);
    struct hapt_data *data = NULL;
    CHECK(hapt_data_open(&test_env, path_of("batches"), model, &(struct hapt_data_order){ROWS, STEPS, 1, true},
                         &data) == HAPT_ERR_INPUT);
    hapt_fail_reset();
}

static void image_refusals(void)
{
    const int64_t good[5] = {STEPS, ROWS, CHANNELS, SIDE, SIDE}, few[5] = {STEPS - 1, ROWS, CHANNELS, SIDE, SIDE};
    const int64_t large[5] = {STEPS, ROWS, CHANNELS, SIDE, SIDE + 1}, grey[5] = {STEPS, ROWS, 1, SIDE, SIDE};
    write_images("images-few", false, 5, few, false, 0);
    write_images("images-large", false, 5, large, false, 0);
    write_images("images-grey", false, 5, grey, false, 0);
    write_images("images-class", false, 5, good, false, CLASSES);
    write_images("images-negative", true, 4, good + 1, false, -1);
    refuse("images-few", ROWS);
    refuse("images-large", ROWS);
    refuse("images-grey", ROWS);
    refuse("images-class", ROWS);
    refuse("images-negative", ROWS);
    refuse("exact-images", ROWS + 2);
    refuse("tokens", ROWS);
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    hapt_arena_init(&arena);
    model = fixture_gpt(
        &arena,
        (struct fixture_gpt){.layers = 1, .hidden = 8, .heads = 1, .sequence = T, .vocab = VOCAB, .microbatch = 2});
    if (test_env.world_rank == 0) {
        snprintf(folder, sizeof folder, "/tmp/hapt-data-XXXXXX");
        CHECK(mkdtemp(folder) != NULL);
    }
    MPI_Bcast(folder, (int)sizeof folder, MPI_CHAR, 0, test_env.world);
    RUN(exact_batches);
    RUN(own_targets);
    RUN(streams);
    RUN(stored_types);
    RUN(targets_of_streams);
    RUN(epochs);
    RUN(refusals);
    model = image_model();
    RUN(exact_images);
    RUN(streams_of_images);
    RUN(image_refusals);
    MPI_Barrier(test_env.world);
    if (test_env.world_rank == 0 && system(hapt_arena_printf(&arena, "rm -rf %s", folder)))
        fprintf(stderr, "rm failed\n");
    hapt_arena_release(&arena);
    return test_finish();
}
