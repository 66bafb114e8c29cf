/* The memo of the beam against the contract of beam_rules.price, for random prices and limits: each of its answers is
 * one that pricing may give. */
#include "test.h"

#include "../../src/search/beam.h"

enum { WORLDS = 40, CANDIDATES = 200, QUERIES = 20000, MANY = 600000 };

static uint64_t seed = 1;

/* A candidate: its bound, and its step; both INFINITY: it is no plan. */
struct priced {
    struct beam_key key;
    double lower_s, step_s;
};

/* Half of the keys begin their search in one of four places. */
static struct beam_key random_key(void)
{
    struct beam_key key = {0};
    beam_key_add(&key, hapt_random_next(&seed));
    if (hapt_random_unit(&seed) < 0.5) key.low %= 4;
    return key;
}

static void draw(struct priced *priced)
{
    *priced = (struct priced){random_key(), hapt_random_unit(&seed), INFINITY};
    const double kind = hapt_random_unit(&seed);
    if (kind < 0.1) priced->lower_s = INFINITY;
    if (kind >= 0.2) priced->step_s = priced->lower_s * (1 + hapt_random_unit(&seed));
    if (kind > 0.9) priced->step_s = priced->lower_s;
}

/* A limit; often the bound or the step of a candidate. */
static double random_limit(const struct priced *priced)
{
    const double kind = hapt_random_unit(&seed);
    return kind < 0.2   ? INFINITY
           : kind < 0.4 ? priced->lower_s
           : kind < 0.6 ? priced->step_s
                        : 2 * hapt_random_unit(&seed);
}

/* A price by the contract: too short at random if that is allowed. */
static double price_of(const struct priced *priced, double limit_s, double most_s)
{
    if (priced->lower_s >= limit_s || isinf(priced->step_s)) return INFINITY;
    if (priced->step_s <= most_s || hapt_random_unit(&seed) < 0.5) return priced->step_s;
    const double between_s = most_s + (priced->step_s - most_s) * hapt_random_unit(&seed);
    return between_s > most_s ? between_s : priced->step_s;
}

static bool is_price(const struct priced *priced, double limit_s, double most_s, double step_s)
{
    if (priced->lower_s >= limit_s || isinf(priced->step_s)) return isinf(step_s) && step_s > 0;
    if (priced->step_s <= most_s) return step_s == priced->step_s;
    return step_s > most_s && step_s <= priced->step_s;
}

/* Limits in any order, or (`falling`) as in one run of the beam: none rises. */
static void query(bool falling)
{
    struct beam_memo memo = {0};
    struct priced *priced = calloc(CANDIDATES, sizeof *priced);
    bool *known = calloc(CANDIDATES, sizeof *known);
    double limit_s = INFINITY, most_s = INFINITY;
    int found = 0;
    for (int k = 0; k < CANDIDATES; k++) draw(&priced[k]);
    for (int q = 0; q < QUERIES; q++) {
        const int k = (int)(hapt_random_next(&seed) % CANDIDATES);
        const double next_s = random_limit(&priced[k]), nearer_s = random_limit(&priced[k]);
        double step_s;
        if (!falling || q % 500 == 0) limit_s = falling ? fmin(limit_s, next_s) : next_s;
        if (!falling || q % 500 == 0) most_s = falling ? fmin(most_s, nearer_s) : nearer_s;
        const bool is_known = beam_memo_find(&memo, priced[k].key, limit_s, most_s, &step_s);
        if (falling) CHECK(is_known == known[k]); /* no candidate is priced twice */
        if (is_known) CHECK(is_price(&priced[k], limit_s, most_s, step_s));
        found += is_known;
        if (is_known) continue;
        step_s = price_of(&priced[k], limit_s, most_s);
        CHECK_OK(beam_memo_add(&memo, priced[k].key, limit_s, most_s, priced[k].lower_s, step_s));
        known[k] = true;
        double again_s;
        CHECK(beam_memo_find(&memo, priced[k].key, limit_s, most_s, &again_s) && again_s == step_s);
    }
    CHECK(found > QUERIES / 2);
    beam_memo_release(&memo);
    free(priced);
    free(known);
}

/* More prices than are kept: those that are found are right. */
static void overflow(void)
{
    struct beam_memo memo = {0};
    int found = 0;
    for (int k = 0; k < MANY; k++) {
        struct beam_key key = {0};
        beam_key_add(&key, (uint64_t)k);
        CHECK_OK(beam_memo_add(&memo, key, INFINITY, INFINITY, k, k));
    }
    for (int k = 0; k < MANY; k++) {
        struct beam_key key = {0};
        double step_s;
        beam_key_add(&key, (uint64_t)k);
        if (!beam_memo_find(&memo, key, INFINITY, INFINITY, &step_s)) continue;
        CHECK(step_s == k);
        found++;
    }
    CHECK(found > MANY / 2 && found < MANY);
    beam_memo_release(&memo);
}

static void limits(void)
{
    for (int w = 0; w < WORLDS; w++) query(w % 2 > 0);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(limits);
    RUN(overflow);
    return test_finish();
}
