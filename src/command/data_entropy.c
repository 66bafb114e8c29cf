/* Frequencies of tokens, and of pairs of neighbours, in memory that does not grow with the text. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "data_files.h"
#include "hapt/progress.h"

static enum hapt_status grow(struct hapt_token_counts *counts, int64_t vocab)
{
    if (vocab > counts->capacity) {
        const int64_t capacity = 2 * vocab;
        int64_t *larger = realloc(counts->count, (size_t)capacity * sizeof *larger);
        if (!larger) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory to count tokens");
        memset(larger + counts->capacity, 0, (size_t)(capacity - counts->capacity) * sizeof *larger);
        counts->count = larger;
        counts->capacity = capacity;
    }
    counts->vocab = vocab;
    return HAPT_OK;
}

/* The piece that holds token `index` of the source; *index becomes its number there. */
static const struct hapt_token_piece *piece_of(const struct hapt_token_source *source, int64_t *index)
{
    int64_t p = 0;
    for (; p + 1 < source->pieces && *index >= source->piece[p].count; p++) *index -= source->piece[p].count;
    return &source->piece[p];
}

static enum hapt_status too_large(const struct hapt_token_source *source, int64_t index, uint32_t token)
{
    const struct hapt_token_piece *piece = piece_of(source, &index);
    const int64_t place = piece->offset / piece->width + index;
    if (token == UINT32_MAX)
        return hapt_fail(HAPT_ERR_INPUT, "choose another --type", "%s: token %" PRId64 " is negative or beyond 32 bits",
                         piece->path, place);
    return hapt_fail(HAPT_ERR_INPUT, "choose another --type",
                     "%s: token %u at %" PRId64 " exceeds the largest vocabulary (%d)", piece->path, (unsigned)token,
                     place, MOST_VOCAB);
}

static enum hapt_status count_block(void *context, int64_t first, const uint32_t *token, int64_t count)
{
    struct hapt_token_counts *counts = context;
    for (int64_t i = 0; i < count; i++) {
        if (token[i] >= MOST_VOCAB) return too_large(counts->source, first + i, token[i]);
        if (token[i] >= counts->vocab) HAPT_TRY(grow(counts, (int64_t)token[i] + 1));
        counts->count[token[i]]++;
        counts->last = token[i];
    }
    return HAPT_OK;
}

enum hapt_status hapt_data_count_tokens(const struct hapt_token_source *source, struct hapt_token_counts *counts)
{
    *counts = (struct hapt_token_counts){.source = source};
    return hapt_data_visit_tokens(source, count_block, counts);
}

/* total x (-sum p ln p), p = count / total. */
static double entropy_sum(const int64_t *count, int64_t length, double total)
{
    double sum = 0;
    for (int64_t i = 0; i < length; i++) {
        if (count[i] > 0) sum -= (double)count[i] * log((double)count[i] / total);
    }
    return sum;
}

enum hapt_status hapt_data_changed(void)
{
    return hapt_fail(HAPT_ERR_INPUT, "start again, and do not change the files while they are read",
                     "an input has changed while it was read");
}

/* The tokens that follow the tokens [first, end), in one reading. */
struct group {
    const struct hapt_token_counts *counts;
    int64_t first, end, pairs;
    uint32_t *follower; /* [pairs] grouped by the previous token; NULL: the one token has more than fit */
    int64_t *fill;      /* [end - first] where the next follower of a token goes */
    int64_t *after;     /* [vocab] counts of the followers of a token; zero between uses */
    int64_t previous;   /* -1: none yet */
};

static int64_t pairs_of(const struct hapt_token_counts *counts, int64_t token)
{
    return counts->count[token] - (token == counts->last);
}

static enum hapt_status take_followers(void *context, int64_t first, const uint32_t *token, int64_t count)
{
    struct group *group = context;
    (void)first;
    for (int64_t i = 0; i < count; i++) {
        const int64_t before = group->previous;
        group->previous = token[i];
        if (before < group->first || before >= group->end) continue;
        const int64_t place = group->follower ? group->fill[before - group->first]++ : 0;
        if (token[i] >= group->counts->vocab || place >= group->pairs) return hapt_data_changed();
        if (group->follower)
            group->follower[place] = token[i];
        else
            group->after[token[i]]++;
    }
    return HAPT_OK;
}

static double sum_group(struct group *group)
{
    const struct hapt_token_counts *counts = group->counts;
    double sum = 0;
    if (!group->follower) {
        sum = entropy_sum(group->after, counts->vocab, (double)group->pairs);
        memset(group->after, 0, (size_t)counts->vocab * sizeof *group->after);
        return sum;
    }
    const uint32_t *follower = group->follower;
    for (int64_t v = group->first; v < group->end; v++) {
        const int64_t pairs = pairs_of(counts, v);
        for (int64_t i = 0; i < pairs; i++) group->after[follower[i]]++;
        /* Use each count at its token's first occurrence and clear it, so that rare previous tokens cost little. */
        for (int64_t i = 0; i < pairs; i++) {
            sum += entropy_sum(&group->after[follower[i]], 1, (double)pairs);
            group->after[follower[i]] = 0;
        }
        follower += pairs;
    }
    return sum;
}

/* Extends the group from `first` on, as far as its pairs fit. */
static void choose_group(struct group *group, int64_t first, int64_t most_pairs)
{
    group->first = first;
    group->previous = -1;
    group->pairs = pairs_of(group->counts, first);
    for (group->end = first + 1; group->end < group->counts->vocab; group->end++) {
        const int64_t pairs = group->pairs + pairs_of(group->counts, group->end);
        if (pairs > most_pairs) break;
        group->pairs = pairs;
    }
}

static enum hapt_status add_group(const struct hapt_token_source *source, struct group *group, int64_t most_pairs,
                                  double *sum)
{
    uint32_t *const follower = group->follower;
    if (group->pairs > most_pairs) group->follower = NULL;
    for (int64_t v = group->first, next = 0; v < group->end; v++) {
        group->fill[v - group->first] = next;
        next += pairs_of(group->counts, v);
    }
    hapt_progress_expect(hapt_data_visit_parts(source));
    const enum hapt_status status = hapt_data_visit_tokens(source, take_followers, group);
    if (status == HAPT_OK) *sum += sum_group(group);
    group->follower = follower;
    return status;
}

enum hapt_status hapt_data_entropies(const struct hapt_token_source *source, const struct hapt_token_counts *counts,
                                     int64_t most_pairs, double *unigram, double *bigram)
{
    const int64_t pairs = source->count - 1, held = pairs < most_pairs ? pairs : most_pairs;
    struct group group = {.counts = counts,
                          .follower = calloc((size_t)held, sizeof *group.follower),
                          .fill = malloc((size_t)counts->vocab * sizeof *group.fill),
                          .after = calloc((size_t)counts->vocab, sizeof *group.after)};
    double sum = 0;
    enum hapt_status status = group.follower && group.fill && group.after
                                  ? HAPT_OK
                                  : hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory to count pairs of tokens");
    *unigram = entropy_sum(counts->count, counts->vocab, (double)source->count) / (double)source->count;
    for (int64_t first = 0; first < counts->vocab && status == HAPT_OK; first = group.end) {
        choose_group(&group, first, most_pairs);
        if (group.pairs > 0) status = add_group(source, &group, most_pairs, &sum);
    }
    *bigram = sum / (double)pairs;
    free(group.follower);
    free(group.fill);
    free(group.after);
    return status;
}
