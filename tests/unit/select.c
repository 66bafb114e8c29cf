/* The ranges of a model that are timed: more equal blocks add none, and the others can be composed from them. */
#include "fixture.h"

#include "hapt/layers.h"

#include "../../src/measure/select.h"
#include "../../src/measure/smooth.h"

struct setting {
    struct hapt_arena arena;
    struct hapt_layers *layers;
    struct hapt_candidates candidates;
    unsigned char *role;
};

static struct hapt_cluster *one_device(struct hapt_arena *arena)
{
    struct hapt_cluster *cluster = hapt_arena_alloc(arena, 1, sizeof *cluster);
    cluster->count = cluster->rank_count = 1;
    cluster->subcluster = hapt_arena_alloc(arena, 1, sizeof *cluster->subcluster);
    cluster->link = hapt_arena_alloc(arena, 1, sizeof *cluster->link);
    cluster->subcluster[0] = (struct hapt_subcluster){.name = "one", .nodes = 1, .devices_per_node = 1};
    cluster->subcluster[0].device = *hapt_device_spec_find("cpu");
    return cluster;
}

static void set_up(struct setting *setting, int blocks, bool *(*forbid)(const struct setting *))
{
    char *words[] = {"hapt", "profile"};
    struct hapt_config *config = NULL;
    const struct hapt_candidates_options data = {.programs = PROGRAM_DATA, .tensor_parallel = 1};
    hapt_arena_init(&setting->arena);
    struct hapt_model *model =
        fixture_gpt(&setting->arena, (struct fixture_gpt){blocks, 32, 2, 16, 64, 2, true, false});
    const struct hapt_layers_options options = {.granularity = 0, .heavy_minimum = 2};
    CHECK_OK(hapt_layers_build(model->graph, &options, &setting->arena, &setting->layers));
    CHECK_OK(hapt_config_parse(2, words, &setting->arena, &config));
    CHECK_OK(hapt_candidates_build(one_device(&setting->arena), model, setting->layers, config, &data, &setting->arena,
                                   &setting->candidates));
    setting->role = hapt_arena_alloc(&setting->arena, (size_t)setting->candidates.item_count, 1);
    bool *needed = hapt_arena_alloc(&setting->arena, (size_t)setting->candidates.item_count, sizeof *needed);
    for (int item = 0; item < setting->candidates.item_count; item++) needed[item] = true;
    if (forbid) needed = forbid(setting);
    CHECK_OK(select_items(&setting->candidates, needed, &setting->arena, setting->role));
}

static int count_of(const struct setting *setting, enum select_role role)
{
    int count = 0;
    for (int item = 0; item < setting->candidates.item_count; item++) count += setting->role[item] == role;
    return count;
}

/* Twice the blocks: four times the ranges, twice the unique ones, one more step of the length ladder. */
static void deeper_models_cost_no_more(void)
{
    int before = 0, structures_before = 0;
    for (int blocks = 12; blocks <= 48; blocks *= 2) {
        struct setting setting;
        set_up(&setting, blocks, NULL);
        const int timed = count_of(&setting, SELECT_BASE) + count_of(&setting, SELECT_WITNESS);
        const int L = setting.candidates.layer_count;
        CHECK(count_of(&setting, SELECT_NONE) == 0 && count_of(&setting, SELECT_WITNESS) >= 4);
        if (before) {
            const int offsets =
                L / blocks + 3; /* unique ranges of one length: offsets in a block, the ends, the whole */
            CHECK(setting.candidates.structure_count > 1.8 * structures_before);
            CHECK_MESSAGE(timed <= before + offsets, "%d blocks: %d ranges timed, half as many blocks: %d", blocks,
                          timed, before);
        }
        before = timed;
        structures_before = setting.candidates.structure_count;
        hapt_arena_release(&setting.arena);
    }
}

static bool *only_short(const struct setting *setting)
{
    const struct hapt_candidates *candidates = &setting->candidates;
    bool *needed =
        hapt_arena_alloc((struct hapt_arena *)&setting->arena, (size_t)candidates->item_count, sizeof *needed);
    for (int s = 0; s < candidates->structure_count; s++) needed[s] = candidates->last[s] - candidates->first[s] < 14;
    return needed;
}

/* The longest needed ranges are timed, whatever their length. Nothing is extrapolated. */
static void nothing_is_extrapolated(void)
{
    struct setting setting;
    set_up(&setting, 12, only_short);
    const struct hapt_candidates *candidates = &setting.candidates;
    for (int s = 0; s < candidates->structure_count; s++) {
        const int length = candidates->last[s] - candidates->first[s] + 1;
        if (length == 14) CHECK(setting.role[s] == SELECT_BASE);
        CHECK((setting.role[s] == SELECT_NONE) == (length > 14));
    }
    hapt_arena_release(&setting.arena);
}

/* Seconds of a layer by its structure. Long ranges take longer than their sum, up to a factor `cold` that grows with
 * length. */
static double truth(const struct hapt_candidates *candidates, int first, int last, double cold)
{
    double sum = 0;
    for (int l = first; l <= last; l++) {
        uint64_t seed = (uint64_t)candidates->structure[l * candidates->layer_count + l];
        sum += 1e-3 * (0.3 + hapt_random_unit(&seed));
    }
    return sum * (1 + cold * (1 - exp(-sum / 10e-3)));
}

/* A composed time is as exact as a measurement. */
static void rest_is_composed(void)
{
    const double cold = 0.15, noise = 0.01;
    struct setting setting;
    set_up(&setting, 24, NULL);
    const struct hapt_candidates *candidates = &setting.candidates;
    const int L = candidates->layer_count, count = candidates->structure_count;
    struct smooth_point *point = hapt_arena_alloc(&setting.arena, (size_t)count, sizeof *point);
    int *variable = hapt_arena_alloc(&setting.arena, (size_t)L, sizeof *variable), variables = 0;
    for (int l = 0; l < L; l++) {
        variable[l] = -1;
        for (int other = 0; other < l && variable[l] < 0; other++)
            if (candidates->structure[l * L + l] == candidates->structure[other * L + other])
                variable[l] = variable[other];
        if (variable[l] < 0) variable[l] = variables++;
    }
    for (uint64_t seed = 1; seed <= 10; seed++) {
        uint64_t random = seed;
        double squares = 0;
        int composed = 0;
        for (int s = 0; s < count; s++) {
            double normal = -6;
            for (int k = 0; k < 12; k++) normal += hapt_random_unit(&random);
            const bool known = setting.role[s] == SELECT_BASE || setting.role[s] == SELECT_WITNESS;
            const double time = truth(candidates, candidates->first[s], candidates->last[s], cold);
            point[s] = (struct smooth_point){candidates->first[s], candidates->last[s],
                                             known ? time * (1 + noise * normal) : -1, 0};
        }
        CHECK_OK(smooth_times(variable, variables, noise, count, point, &setting.arena));
        for (int s = 0; s < count; s++) {
            if (setting.role[s] != SELECT_REST) continue;
            const double time = truth(candidates, candidates->first[s], candidates->last[s], cold);
            squares += pow(point[s].estimate_s / time - 1, 2);
            composed++;
        }
        CHECK(composed > 200);
        CHECK_MESSAGE(sqrt(squares / composed) < noise, "seed %d: composed times are off by %.2f %%", (int)seed,
                      100 * sqrt(squares / composed));
    }
    hapt_arena_release(&setting.arena);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(deeper_models_cost_no_more);
    RUN(nothing_is_extrapolated);
    RUN(rest_is_composed);
    return test_finish();
}
