/* Ranges of a team: which are run, and the composition of the others. The team's clock is a formula here. */
#include "test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../../src/measure/team_ranges.h"

enum { L = 9 };

/* Layers 1 to 7 are equal blocks. */
struct setting {
    struct hapt_candidates candidates;
    int structure[L * L], longest;
    double layer[3][L];
    struct hapt_arena arena;
    struct hapt_range_times *times;
    struct team_ranges ranges;
};

static bool is_wanted(const void *context, int first, int last)
{
    const struct setting *setting = context;
    return last - first < setting->longest;
}

static void set_up(struct setting *setting, int longest)
{
    static double work[L + 1];
    *setting = (struct setting){.longest = longest};
    hapt_arena_init(&setting->arena);
    setting->candidates = (struct hapt_candidates){.layer_count = L, .structure = setting->structure, .work = work};
    for (int i = 0; i < L; i++)
        for (int j = i; j < L; j++) { /* a range of blocks is known by its length; others stand alone */
            const bool blocks = i >= 1 && j <= 7;
            setting->structure[i * L + j] = blocks ? j - i : L + i * L + j;
        }
    setting->candidates.structure_count = L + L * L;
    for (int t = 0; t < 3; t++)
        for (int l = 0; l < L; l++) setting->layer[t][l] = (l == 0 ? 0.25 : l == 8 ? 2.5 : 1.0) / (1 + t);
    CHECK_OK(hapt_range_times_create(L, &setting->arena, &setting->times));
    CHECK_OK(
        team_ranges_list(&setting->candidates, is_wanted, setting, setting->times, &setting->arena, &setting->ranges));
}

static double sum_of(const struct setting *setting, int t, int cell)
{
    double sum = 0;
    for (int l = cell / L; l <= cell % L; l++) sum += setting->layer[t][l];
    return sum;
}

/* The first `count` ranges of the order, `factor` times as long as the sums of their layers, and their equals. */
static void run_first(struct setting *setting, int count, double factor)
{
    double *const table[3] = {setting->times->stage_s, setting->times->forward_s, setting->times->step_s};
    for (int k = 0; k < count; k++)
        for (int cell = 0; cell < L * L; cell++) {
            if (cell / L > cell % L || setting->structure[cell] != setting->structure[setting->ranges.order[k]])
                continue;
            setting->ranges.run[cell] = true;
            for (int t = 0; t < 3; t++) table[t][cell] = factor * sum_of(setting, t, cell);
        }
}

static void compose(struct setting *setting)
{
    double *base[3], proportional[3][L];
    for (int t = 0; t < 3; t++)
        for (int l = 0; l < L; l++) proportional[t][l] = 7 * setting->layer[t][l];
    const double *const layer[3] = {proportional[0], proportional[1], proportional[2]};
    CHECK_OK(team_ranges_sums(&setting->ranges, layer, &setting->arena, base));
    CHECK_OK(team_ranges_compose(&setting->ranges, is_wanted, setting, (const double *const *)base, &setting->arena));
}

/* Every structure that is wanted once: the longest of both kinds, then single layers. */
static void order(void)
{
    for (int longest = 1; longest <= L; longest++) {
        struct setting setting;
        int wanted = 0;
        bool *seen = calloc(L + L * L, sizeof *seen);
        set_up(&setting, longest);
        for (int i = 0; i < L; i++)
            for (int j = i; j < L && j - i < longest; j++) {
                wanted += !seen[setting.structure[i * L + j]];
                seen[setting.structure[i * L + j]] = true;
            }
        CHECK(setting.ranges.count == wanted);
        for (int k = 0; k < setting.ranges.count; k++) {
            CHECK(seen[setting.structure[setting.ranges.order[k]]]); /* each once */
            seen[setting.structure[setting.ranges.order[k]]] = false;
            CHECK(is_wanted(&setting, setting.ranges.order[k] / L, setting.ranges.order[k] % L));
        }
        const int first = setting.ranges.order[0];
        CHECK(first % L - first / L == longest - 1);
        free(seen);
        hapt_arena_release(&setting.arena);
    }
}

/* Times that are sums over layers, times a factor, are composed exactly, whatever part of them was run. */
static void sums_are_exact(void)
{
    for (int longest = 1; longest <= L; longest++)
        for (int count = 1;; count++) {
            struct setting setting;
            set_up(&setting, longest);
            const bool last = count == setting.ranges.count;
            double *const table[3] = {setting.times->stage_s, setting.times->forward_s, setting.times->step_s};
            run_first(&setting, count, 1.5);
            compose(&setting);
            for (int cell = 0; cell < L * L; cell++)
                for (int t = 0; t < 3 && cell / L <= cell % L; t++) {
                    if (is_wanted(&setting, cell / L, cell % L))
                        CHECK_NEAR(table[t][cell], 1.5 * sum_of(&setting, t, cell), 1e-12);
                    else
                        CHECK(isnan(table[t][cell]));
                }
            hapt_arena_release(&setting.arena);
            if (last) break;
        }
}

/* Times with a part for each pass beside the sums are composed exactly from a few ranges, even if some of them are
 * disturbed. */
static void passes_cost(void)
{
    for (int longest = 5; longest <= L; longest++)
        for (int disturbed = 0; disturbed < 2; disturbed++)
            for (int count = 3 + L;; count++) {
                struct setting setting;
                double *base[3];
                set_up(&setting, longest);
                const bool last = count >= setting.ranges.count;
                double *const table[3] = {setting.times->stage_s, setting.times->forward_s, setting.times->step_s};
                if (last) count = setting.ranges.count;
                run_first(&setting, count, 1.5);
                for (int t = 0; t < 3; t++) {
                    base[t] = calloc((size_t)L * L, sizeof *base[t]);
                    for (int cell = 0; cell < L * L; cell++)
                        if (cell / L <= cell % L) base[t][cell] = sum_of(&setting, t, cell);
                    for (int cell = 0; cell < L * L; cell++)
                        if (setting.ranges.run[cell]) table[t][cell] += 0.125;
                }
                for (int k = 0, seen[2] = {0}; disturbed && k < count; k++) {
                    const int cell = setting.ranges.order[k];
                    for (int t = 0; t < 3 && seen[cell % L == L - 1] % 8 == 0; t++) table[t][cell] *= 1.3;
                    seen[cell % L == L - 1]++;
                }
                CHECK_OK(team_ranges_compose(&setting.ranges, is_wanted, &setting, (const double *const *)base,
                                             &setting.arena));
                for (int cell = 0; cell < L * L; cell++)
                    for (int t = 0; t < 3 && cell / L <= cell % L; t++)
                        if (is_wanted(&setting, cell / L, cell % L) && !setting.ranges.run[cell]) {
                            const double right = 1.5 * base[t][cell] + 0.125;
                            CHECK_NEAR(table[t][cell], right, disturbed ? 0.1 * right : 1e-9);
                        }
                for (int t = 0; t < 3; t++) free(base[t]);
                hapt_arena_release(&setting.arena);
                if (last) break;
            }
}

/* If single layers define the base, they do not hide that longer ranges take less than the sums. */
static void single_layers_are_the_base(void)
{
    struct setting setting;
    set_up(&setting, L);
    const int singles = 3, longest = 2;
    double *const table[3] = {setting.times->stage_s, setting.times->forward_s, setting.times->step_s};
    run_first(&setting, longest + singles, 1);
    for (int cell = 0; cell < L * L; cell++)
        for (int t = 0; t < 3 && setting.ranges.run[cell]; t++)
            if (cell / L != cell % L) table[t][cell] *= 0.8;
    compose(&setting);
    for (int i = 0; i < L; i++)
        for (int j = i + 1; j < L; j++)
            for (int t = 0; t < 3; t++) CHECK_NEAR(table[t][i * L + j], 0.8 * sum_of(&setting, t, i * L + j), 1e-12);
    hapt_arena_release(&setting.arena);
}

/* Equal ranges have equal times, bit for bit, even if times are no sums. */
static void equals_are_equal(void)
{
    for (int count = 1; count <= 12; count++) {
        struct setting setting;
        set_up(&setting, 6);
        run_first(&setting, count, 1);
        for (int cell = 0; cell < L * L; cell++) /* a long range costs more than its layers */
            if (setting.ranges.run[cell]) setting.times->stage_s[cell] *= 1 + 0.01 * (cell % L - cell / L);
        compose(&setting);
        for (int a = 0; a < L * L; a++)
            for (int b = 0; b < a; b++)
                if (a / L <= a % L && b / L <= b % L && setting.structure[a] == setting.structure[b] &&
                    isfinite(setting.times->stage_s[a]))
                    CHECK_NEAR(setting.times->stage_s[a], setting.times->stage_s[b], 0);
        hapt_arena_release(&setting.arena);
    }
}

int main(void)
{
    RUN(order);
    RUN(sums_are_exact);
    RUN(passes_cost);
    RUN(single_layers_are_the_base);
    RUN(equals_are_equal);
    return test_finish();
}
