/* Runs beside others: it measures no time.
 * Entropies of token files, in groups of any size, against sums over all pairs; tokens in pieces of several widths and
 * files, against the tokens that were written. */
#include "../../src/command/data_files.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "hapt/env.h"
#include "test.h"

enum { FILES = 3, MOST = 3000, VOCAB = 23 };

static struct hapt_arena arena;
static char folder[64];

static void write_file(const char *path, const uint32_t *token, int count, int width)
{
    FILE *file = fopen(path, "wb");
    for (int i = 0; i < count; i++)
        for (int b = 0; b < width; b++) fputc(b < 4 ? (int)(token[i] >> 8 * b & 255) : 0, file);
    CHECK(fclose(file) == 0);
}

struct seen {
    uint32_t *token;
    int64_t count;
};

static enum hapt_status remember(void *context, int64_t first, const uint32_t *token, int64_t count)
{
    struct seen *seen = context;
    CHECK(first == seen->count && count <= HAPT_TOKEN_BLOCK);
    memcpy(seen->token + first, token, (size_t)count * sizeof *token);
    seen->count += count;
    return HAPT_OK;
}

/* By the definition: the mean of -ln p(next | this). */
static double bigram_of(const uint32_t *token, int count)
{
    static double pairs[VOCAB][VOCAB], all[VOCAB];
    double sum = 0;
    memset(pairs, 0, sizeof pairs);
    memset(all, 0, sizeof all);
    for (int i = 0; i + 1 < count; i++) pairs[token[i]][token[i + 1]]++, all[token[i]]++;
    for (int i = 0; i + 1 < count; i++) sum -= log(pairs[token[i]][token[i + 1]] / all[token[i]]);
    return sum / (count - 1);
}

static double unigram_of(const uint32_t *token, int count)
{
    double all[VOCAB] = {0}, sum = 0;
    for (int i = 0; i < count; i++) all[token[i]]++;
    for (int i = 0; i < count; i++) sum -= log(all[token[i]] / count);
    return sum / count;
}

static void one(uint64_t *seed)
{
    static uint32_t token[FILES * MOST], found[FILES * MOST];
    struct hapt_token_source source = {.pieces = 0};
    struct hapt_token_counts counts;
    int total = 0;
    const int skew = 1 + (int)(hapt_random_next(seed) % 4);
    for (int f = 0; f < FILES; f++) {
        const int width = 1 << hapt_random_next(seed) % 4, count = (int)(hapt_random_next(seed) % MOST);
        const char *path = hapt_arena_printf(&arena, "%s/%d", folder, f);
        for (int i = 0; i < count; i++) {
            const double unit = pow(hapt_random_unit(seed), skew);
            token[total + i] = (uint32_t)(unit * VOCAB);
        }
        write_file(path, token + total, count, width);
        const int cut = count > 0 ? (int)(hapt_random_next(seed) % (unsigned)count) : 0;
        CHECK_OK(hapt_data_add_piece(&source, &arena, &(struct hapt_token_piece){path, 0, cut, width, false}));
        CHECK_OK(hapt_data_add_piece(
            &source, &arena, &(struct hapt_token_piece){path, (int64_t)cut * width, count - cut, width, false}));
        total += count;
    }
    CHECK(source.count == total && source.pieces <= FILES);
    if (total < 2) return;
    struct seen seen = {found, 0};
    CHECK_OK(hapt_data_visit_tokens(&source, remember, &seen));
    CHECK(seen.count == total && !memcmp(found, token, (size_t)total * sizeof *token));
    CHECK_OK(hapt_data_count_tokens(&source, &counts));
    for (int64_t most = 1; most < 4 * total; most = most * 5 + 1) {
        double unigram, bigram;
        CHECK_OK(hapt_data_entropies(&source, &counts, most, &unigram, &bigram));
        CHECK_MESSAGE(fabs(unigram - unigram_of(token, total)) < 1e-9, "%g", unigram);
        CHECK_MESSAGE(fabs(bigram - bigram_of(token, total)) < 1e-9, "%g with groups of %lld", bigram, (long long)most);
    }
    free(counts.count);
}

/* Tokens of 8 bytes that no vocabulary holds, and more than one block. */
static void limits(void)
{
    const char *path = hapt_arena_printf(&arena, "%s/wide", folder);
    struct hapt_token_counts counts;
    FILE *file = fopen(path, "wb");
    const int64_t large[] = {1, 2, -1, 4, (int64_t)1 << 32};
    CHECK(fwrite(large, sizeof *large, 5, file) == 5 && fclose(file) == 0);
    for (int i = 2; i < 5; i += 2) {
        struct hapt_token_source source = {.pieces = 0};
        CHECK_OK(hapt_data_add_piece(&source, &arena, &(struct hapt_token_piece){path, 8L * i, 1, 8, false}));
        CHECK(hapt_data_count_tokens(&source, &counts) == HAPT_ERR_INPUT);
        hapt_fail_reset();
        free(counts.count);
    }
    struct hapt_token_source source = {.pieces = 0};
    const int64_t many = 2 * HAPT_TOKEN_BLOCK + 5;
    path = hapt_arena_printf(&arena, "%s/many", folder);
    CHECK(truncate((fclose(fopen(path, "wb")), path), 2 * many) == 0);
    CHECK_OK(hapt_data_add_piece(&source, &arena, &(struct hapt_token_piece){path, 0, many, 2, false}));
    CHECK_OK(hapt_data_count_tokens(&source, &counts));
    CHECK(counts.vocab == 1 && counts.count[0] == many && hapt_data_visit_parts(&source) == 3);
    double unigram, bigram;
    CHECK_OK(hapt_data_entropies(&source, &counts, 100, &unigram, &bigram));
    CHECK(unigram == 0 && bigram == 0);
    free(counts.count);
}

int main(void)
{
    uint64_t seed = 5;
    hapt_arena_init(&arena);
    snprintf(folder, sizeof folder, "/tmp/hapt-entropy-XXXXXX");
    CHECK(mkdtemp(folder) != NULL);
    for (int i = 0; i < 60; i++) one(&seed);
    limits();
    if (system(hapt_arena_printf(&arena, "rm -rf %s", folder))) fprintf(stderr, "rm failed\n");
    hapt_arena_release(&arena);
    return test_finish();
}
