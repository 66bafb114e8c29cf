/*
 * Operators on shards of an index that integer operands contain (tables, classes), compared with the same kernels on
 * the whole. Shards are uneven and run in separate threads, which synchronise at their exchange.
 */
#include "kernels.h"

#include <pthread.h>

enum { MOST_SHARDS = 5 };

static enum hapt_dtype types[] = {HAPT_F32, HAPT_BF16}; /* the second: each half-precision type */

/* ---- concurrent shards ---- */

struct meeting {
    int shards;
    pthread_barrier_t barrier;
    float *data[MOST_SHARDS];
};

struct shard {
    struct meeting *meeting;
    int index;
    const char *op;
    enum hapt_dtype dtype;
    struct hapt_call call;
    enum hapt_status status;
};

static enum hapt_status exchange(void *context, float *data, size_t elements, bool largest)
{
    struct shard *shard = context;
    struct meeting *meeting = shard->meeting;
    meeting->data[shard->index] = data;
    pthread_barrier_wait(&meeting->barrier);
    float *result = malloc(elements * sizeof *result);
    memcpy(result, meeting->data[0], elements * sizeof *result);
    for (int s = 1; s < meeting->shards; s++)
        for (size_t i = 0; i < elements; i++) {
            const float term = meeting->data[s][i];
            result[i] = !largest ? result[i] + term : term > result[i] ? term : result[i];
        }
    pthread_barrier_wait(&meeting->barrier);
    memcpy(data, result, elements * sizeof *result);
    free(result);
    pthread_barrier_wait(&meeting->barrier);
    return HAPT_OK;
}

static void *run_shard(void *argument)
{
    struct shard *shard = argument;
    shard->call.shard_reduce_context = shard;
    shard->status = kernel_run_on(shard->index, shard->op, shard->dtype, &shard->call);
    return NULL;
}

static void run_all(struct shard *shard, int shards, const char *op, enum hapt_dtype dtype)
{
    struct meeting meeting = {.shards = shards};
    pthread_t thread[MOST_SHARDS];
    pthread_barrier_init(&meeting.barrier, NULL, (unsigned)shards);
    for (int s = 0; s < shards; s++) {
        shard[s].meeting = &meeting;
        shard[s].index = s;
        shard[s].op = op;
        shard[s].dtype = dtype;
        CHECK(pthread_create(&thread[s], NULL, run_shard, &shard[s]) == 0);
    }
    for (int s = 0; s < shards; s++) {
        pthread_join(thread[s], NULL);
        CHECK_MESSAGE(shard[s].status == HAPT_OK, "shard %d of %s fails", s, op);
        for (int o = 0; o < shard[s].call.output_count; o++) check_guard(&shard[s].call.output[o], op);
    }
    pthread_barrier_destroy(&meeting.barrier);
}

/* Divides [0, values) into `shards` uneven, non-empty ranges. */
static void cut(int64_t values, int shards, int64_t *first)
{
    first[0] = 0;
    for (int s = 0; s < shards; s++) {
        const int64_t most = values - first[s] - (shards - s - 1);
        first[s + 1] = s == shards - 1 ? values : first[s] + 1 + (int64_t)(random_bits() % (uint64_t)most);
    }
}

/* Columns [first, first + shard's columns) of every row, or back. */
static void copy_columns(struct hapt_view *whole, struct hapt_view *shard, int64_t first, bool back)
{
    const int64_t wide = whole->shape[whole->dims - 1], narrow = shard->shape[shard->dims - 1];
    for (int64_t r = 0; r < hapt_view_elements(shard) / narrow; r++)
        for (int64_t c = 0; c < narrow; c++) {
            if (back)
                element_set(whole, r * wide + first + c, element_get(shard, r * narrow + c));
            else
                element_set(shard, r * narrow + c, element_get(whole, r * wide + first + c));
        }
}

static void copy_rows(struct hapt_view *whole, struct hapt_view *shard, int64_t first)
{
    const int64_t columns = whole->shape[1];
    for (int64_t i = 0; i < shard->shape[0] * columns; i++)
        element_set(shard, i, element_get(whole, first * columns + i));
}

/* ---- tables ---- */

/* Rows of the shards add up to those of the whole. Each word is in one shard; only the first shard adds positions. */
static void check_embedding(enum hapt_dtype dtype, int shards, int64_t words, int64_t columns)
{
    if (is_seen(dtype)) return;
    const int64_t batch = 2, length = 7;
    int64_t first[MOST_SHARDS + 1];
    cut(words, shards, first);
    struct tensor token = TENSOR(HAPT_I32, 0, (double)words - 1e-9, batch, length);
    struct tensor table = TENSOR(dtype, -1, 1, words, columns), place = TENSOR(dtype, -1, 1, length, columns);
    struct tensor x = TENSOR(dtype, 0, 0, batch, length, columns), dy = TENSOR(dtype, -1, 1, batch, length, columns);
    struct tensor dtable = TENSOR(HAPT_F32, 1, 2, words, columns), dplace = TENSOR(HAPT_F32, 0, 0, length, columns);
    struct tensor part[MOST_SHARDS], out[MOST_SHARDS], dpart[MOST_SHARDS], dplaces[MOST_SHARDS];
    struct shard shard[MOST_SHARDS] = {{0}}, back[MOST_SHARDS] = {{0}};
    for (int s = 0; s < shards; s++) {
        const int64_t here = first[s + 1] - first[s];
        part[s] = TENSOR(dtype, 0, 0, here, columns);
        copy_rows(&table.view, &part[s].view, first[s]);
        out[s] = TENSOR(dtype, 5, 5, batch, length, columns);
        dpart[s] = TENSOR(HAPT_F32, 0, 0, here, columns);
        copy_rows(&dtable.view, &dpart[s].view, first[s]);
        dplaces[s] = TENSOR(HAPT_F32, 0, 0, length, columns);
        shard[s].call = (struct hapt_call){.input_count = 3,
                                           .output_count = 1,
                                           .threads = 1,
                                           .first_value = first[s],
                                           .value_count = words,
                                           .input = {token.view, part[s].view},
                                           .output = {out[s].view}};
        if (s == 0) shard[s].call.input[2] = place.view;
        back[s].call = (struct hapt_call){.input_count = 2,
                                          .output_count = s == 0 ? 2 : 1,
                                          .threads = 1,
                                          .accumulate = 3,
                                          .first_value = first[s],
                                          .value_count = words,
                                          .input = {token.view, dy.view},
                                          .output = {dpart[s].view, dplaces[s].view}};
    }
    struct hapt_call call = {.input_count = 3,
                             .output_count = 1,
                             .threads = 1,
                             .input = {token.view, table.view, place.view},
                             .output = {x.view}};
    kernel_run("embedding", dtype, &call);
    call = (struct hapt_call){.input_count = 2,
                              .output_count = 2,
                              .threads = 1,
                              .accumulate = 3,
                              .input = {token.view, dy.view},
                              .output = {dtable.view, dplace.view}};
    kernel_run("embedding_dw", dtype, &call);
    run_all(shard, shards, "embedding", dtype);
    run_all(back, shards, "embedding_dw", dtype);
    for (int64_t i = 0; i < x.count; i++) {
        double sum = 0;
        for (int s = 0; s < shards; s++) sum += element_get(&out[s].view, i);
        /* In bf16 a row and its position are rounded separately. */
        CHECK_NEAR(sum, element_get(&x.view, i), dtype == HAPT_F32 ? 3e-7 : 3 * HALF_UNIT(dtype));
    }
    for (int s = 0; s < shards; s++)
        for (int64_t i = 0; i < dpart[s].count; i++)
            CHECK(element_get(&dpart[s].view, i) == element_get(&dtable.view, first[s] * columns + i));
    for (int64_t i = 0; i < dplace.count; i++) CHECK(element_get(&dplaces[0].view, i) == element_get(&dplace.view, i));
    element_set(&token.view, 3, (double)words); /* in no shard's table */
    for (int s = 0; s < shards; s++) CHECK_FAILS(kernel_run_on(0, "embedding", dtype, &shard[s].call), HAPT_ERR_INPUT);
    struct tensor *const all[] = {&token, &table, &place, &x, &dy, &dtable, &dplace};
    for (int k = 0; k < 7; k++) tensor_free(all[k]);
    for (int s = 0; s < shards; s++) {
        struct tensor *const its[] = {&part[s], &out[s], &dpart[s], &dplaces[s]};
        for (int k = 0; k < 4; k++) tensor_free(its[k]);
    }
}

static void tables(void)
{
    for (int round = 0; round < rounds_of(60); round++)
        check_embedding(types[round & 1], 1 + round % MOST_SHARDS, 5 + (int64_t)(random_bits() % 60),
                        1 + (int64_t)(random_bits() % 70));
}

/* ---- classes ---- */

static void check_loss(enum hapt_dtype dtype, int shards, int64_t rows, int64_t classes, double range)
{
    if (is_seen(dtype)) return;
    int64_t first[MOST_SHARDS + 1];
    cut(classes, shards, first);
    struct tensor logits = TENSOR(dtype, -range, range, 1, rows, classes);
    struct tensor target = TENSOR(HAPT_I32, 0, (double)classes - 1e-9, 1, rows);
    for (int64_t r = 1; r < rows; r += 3) element_set(&target.view, r, -100);
    struct tensor loss = TENSOR(HAPT_F32, 0, 0, 1), lse = TENSOR(HAPT_F32, 0, 0, 1, rows);
    struct tensor scale = TENSOR(HAPT_F32, 0.3, 0.7, 1);
    struct tensor before = TENSOR(dtype, -1, 1, 1, rows, classes), dlogits = TENSOR(dtype, 0, 0, 1, rows, classes);
    struct tensor joined = TENSOR(dtype, 0, 0, 1, rows, classes);
    struct hapt_call call = {.input_count = 2,
                             .output_count = 2,
                             .threads = 1,
                             .input = {logits.view, target.view},
                             .output = {loss.view, lse.view}};
    kernel_run("cross_entropy", dtype, &call);
    for (unsigned add = 0; add < 2; add++) {
        struct tensor part[MOST_SHARDS], d[MOST_SHARDS], losses[MOST_SHARDS], lses[MOST_SHARDS];
        struct shard shard[MOST_SHARDS] = {{0}}, back[MOST_SHARDS] = {{0}};
        for (int64_t i = 0; i < dlogits.count; i++) element_set(&dlogits.view, i, element_get(&before.view, i));
        call = (struct hapt_call){.input_count = 4,
                                  .output_count = 1,
                                  .threads = 1,
                                  .accumulate = add,
                                  .real = {add ? 0.1 : 0},
                                  .input = {logits.view, target.view, lse.view, scale.view},
                                  .output = {dlogits.view}};
        for (int s = 0; s < shards; s++) {
            const int64_t here = first[s + 1] - first[s];
            part[s] = TENSOR(dtype, 0, 0, 1, rows, here);
            d[s] = TENSOR(dtype, 0, 0, 1, rows, here);
            losses[s] = TENSOR(HAPT_F32, 0, 0, 1);
            lses[s] = TENSOR(HAPT_F32, 0, 0, 1, rows);
            copy_columns(&logits.view, &part[s].view, first[s], false);
            copy_columns(&before.view, &d[s].view, first[s], false);
            shard[s].call = (struct hapt_call){.input_count = 2,
                                               .output_count = 2,
                                               .threads = 1,
                                               .first_value = first[s],
                                               .value_count = classes,
                                               .shard_reduce = exchange,
                                               .input = {part[s].view, target.view},
                                               .output = {losses[s].view, lses[s].view}};
            back[s].call = (struct hapt_call){.input_count = 4,
                                              .output_count = 1,
                                              .threads = 1,
                                              .accumulate = add,
                                              .real = {add ? 0.1 : 0},
                                              .first_value = first[s],
                                              .value_count = classes,
                                              .input = {part[s].view, target.view, lse.view, scale.view},
                                              .output = {d[s].view}};
        }
        run_all(shard, shards, "cross_entropy", dtype);
        kernel_run("cross_entropy_dx", dtype, &call);
        run_all(back, shards, "cross_entropy_dx", dtype);
        for (int s = 0; s < shards; s++) {
            /* fp32 sums of exponentials over shards, relative to the loss. */
            CHECK_NEAR(element_get(&losses[s].view, 0), element_get(&loss.view, 0),
                       1e-6 * (1 + fabs(element_get(&loss.view, 0))));
            CHECK(element_get(&losses[s].view, 0) == element_get(&losses[0].view, 0));
            for (int64_t r = 0; r < rows; r++) {
                CHECK_NEAR(element_get(&lses[s].view, r), element_get(&lse.view, r), 1e-6 * (1 + range));
                CHECK(element_get(&lses[s].view, r) == element_get(&lses[0].view, r));
            }
            copy_columns(&joined.view, &d[s].view, first[s], true);
        }
        for (int64_t i = 0; i < dlogits.count; i++)
            CHECK(element_get(&joined.view, i) == element_get(&dlogits.view, i));
        for (int s = 0; s < shards; s++) {
            struct tensor *const its[] = {&part[s], &d[s], &losses[s], &lses[s]};
            for (int k = 0; k < 4; k++) tensor_free(its[k]);
        }
    }
    struct tensor *const all[] = {&logits, &target, &loss, &lse, &scale, &before, &dlogits, &joined};
    for (int k = 0; k < 8; k++) tensor_free(all[k]);
}

static void classes(void)
{
    for (int round = 0; round < rounds_of(60); round++)
        check_loss(types[round & 1], 1 + round % MOST_SHARDS, 1 + (int64_t)(random_bits() % 20),
                   5 + (int64_t)(random_bits() % 100), round % 7 == 0 ? 60 : 4);
}

int main(int argc, char **argv)
{
    kernels_init(&argc, &argv);
    for (HALF_TYPES(half)) {
        types[1] = half;
        RUN(tables);
        RUN(classes);
    }
    return kernels_finish();
}
