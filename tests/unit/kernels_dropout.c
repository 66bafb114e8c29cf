/* Dropout against masks from single random words, and the generator against the published numbers of Random123. */
#include "hapt/philox.h"
#include "kernels.h"

static enum hapt_dtype types[] = {HAPT_F32, HAPT_BF16}; /* the second: each half-precision type */

/* The known answers of philox4x32-10 in Random123 (kat_vectors). */
static void known_answers(void)
{
    static const struct {
        uint32_t counter[4], key[2], word[4];
    } known[] = {
        {{0}, {0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t k = 0; k < sizeof known / sizeof *known; k++) {
        struct hapt_philox counter;
        memcpy(counter.word, known[k].counter, sizeof counter.word);
        const struct hapt_philox found = hapt_philox_words(counter, known[k].key[0], known[k].key[1]);
        CHECK(memcmp(found.word, known[k].word, sizeof found.word) == 0);
    }
}

/* The second row has no key: nothing of it is dropped. */
static void check_dropout(const int64_t *s, double dropped, enum hapt_dtype dtype, bool add, int threads)
{
    const int64_t rows = s[0], width = s[1] * s[2], number = 3 + width;
    struct tensor x = TENSOR(dtype, -4, 4, rows, s[1], s[2]), y = TENSOR(dtype, -1, 1, rows, s[1], s[2]);
    struct tensor keys = TENSOR(HAPT_I32, -2000000000, 2000000000, rows, 2);
    double *expected = malloc((size_t)x.count * sizeof *expected);
    int64_t kept = 0, in_question = 0;
    int32_t *key = keys.view.data;
    if (rows > 1) key[2] = key[3] = 0;
    if (rows > 2) key[4] = 0; /* half of a key is one */
    for (int64_t i = 0; i < x.count; i++) {
        const uint32_t *own = (const uint32_t *)&key[2 * (i / width)];
        const double part = hapt_dropout_word(own[0], own[1], (uint32_t)number, i % width) * 0x1p-32;
        const bool drops = own[0] || own[1], keeps = !drops || part >= dropped;
        expected[i] = (keeps ? x.value[i] / (drops ? 1 - dropped : 1) : 0) + (add ? y.value[i] : 0);
        in_question += drops;
        kept += drops && keeps;
    }
    struct hapt_call call = {.input_count = 2,
                             .output_count = 1,
                             .input = {x.view, keys.view},
                             .output = {y.view},
                             .integer = {number},
                             .real = {dropped},
                             .accumulate = add,
                             .threads = threads};
    kernel_run("dropout", dtype, &call);
    check_close(&y.view, expected, dtype == HAPT_F32 ? 1e-6 : 2 * HALF_UNIT(dtype), "dropout");
    const double deviation = sqrt(dropped * (1 - dropped) / (double)in_question);
    CHECK_MESSAGE(fabs((double)kept / (double)in_question - (1 - dropped)) <= 5 * deviation,
                  "%lld of %lld elements are kept, a share of %g is dropped", (long long)kept, (long long)in_question,
                  dropped);
    free(expected);
    tensor_free(&x);
    tensor_free(&y);
    tensor_free(&keys);
}

static void dropouts(void)
{
    static const int64_t shapes[][3] = {{1, 1, 1}, {3, 5, 7}, {2, 4, 64}, {4, 3, 31}, {3, 67, 129}, {2, 1, 4097}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int v = 0; v < 8; v += getenv("HAPT_TEST_QUICK") ? 3 : 1)
            check_dropout(shapes[i], v & 4 ? 0.1 : 0.75, types[v & 1], v & 2, v & 4 ? 2 : 1);
}

/* Masks of other operators and other rows are other ones: they agree in as many elements as by chance. */
static void masks_differ(void)
{
    enum { COUNT = 4096 };
    const struct {
        uint32_t key[2], number;
    } mask[] = {{{1, 2}, 0}, {{1, 2}, 1}, {{2, 2}, 0}, {{1, 3}, 0}};
    for (int a = 0; a < 4; a++)
        for (int b = 0; b < a; b++) {
            int same = 0;
            for (int64_t e = 0; e < COUNT; e++)
                same += (hapt_dropout_word(mask[a].key[0], mask[a].key[1], mask[a].number, e) >> 31) ==
                        (hapt_dropout_word(mask[b].key[0], mask[b].key[1], mask[b].number, e) >> 31);
            CHECK_MESSAGE(abs(same - COUNT / 2) < 5 * 32, "masks %d and %d agree in %d of %d", a, b, same, COUNT);
        }
}

int main(int argc, char **argv)
{
    kernels_init(&argc, &argv);
    RUN(known_answers);
    RUN(masks_differ);
    for (HALF_TYPES(half)) {
        types[1] = half;
        RUN(dropouts);
    }
    return kernels_finish();
}
