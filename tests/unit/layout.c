/* Layouts in profiles and plans: the layout that is read lays a graph out like the one that was written. Invalid tables
 * are refused. */
#include <sys/stat.h>
#include <unistd.h>

#include "fixture.h"

#include "hapt/search.h"
#include "hapt/plan.h"
#include "hapt/program.h"

static char folder[64];

static const char *path_of(const char *name)
{
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

/* Shards rows of each operator that has them, by ratios; the rest is whole. */
static struct hapt_axis_program *by_rows(const struct hapt_sharding *sharding, int axis, const struct hapt_axis *ranks,
                                         struct hapt_arena *arena)
{
    const struct hapt_graph *graph = sharding->graph;
    struct hapt_axis_program *program = NULL;
    struct hapt_cut *cut = hapt_arena_alloc(arena, (size_t)graph->op_count, sizeof *cut);
    for (int o = 0; o < graph->op_count; o++) cut[o] = (struct hapt_cut){.letter = 'b', .blocks = 1, .unit = 1};
    CHECK_OK(hapt_axis_program_complete(sharding, axis, ranks, cut, arena, &program));
    if (!program) exit(1);
    return program;
}

static struct hapt_stage_layout *uneven(const struct hapt_graph *graph, struct hapt_arena *arena)
{
    static const double ratio[2][2] = {{0.75, 0.25}, {0.5, 0.5}};
    struct hapt_stage_layout *layout = hapt_arena_alloc(arena, 1, sizeof *layout);
    struct hapt_sharding *one;
    CHECK_OK(hapt_sharding_trivial(graph, arena, &one));
    *layout = (struct hapt_stage_layout){.axis = {{.size = 1}, {.size = 2, .ratio_count = 2, .ratio = &ratio[0][0]}},
                                         .name = "rows, three to one"};
    CHECK_OK(hapt_sharding_apply(one, 0, &layout->axis[0], NULL, arena, &one));
    layout->program[1] = by_rows(one, 1, &layout->axis[1], arena);
    return layout;
}

static struct hapt_profile *profile_of(const struct hapt_stage_layout *const *layout, struct hapt_arena *arena)
{
    static const struct hapt_submesh row[3] = {{1, 1, 1, 0, 0, 0}, {1, 2, 1, 0, 0, 0}, {1, 2, 1, 1, 0, 0}};
    struct hapt_profile *profile;
    CHECK_OK(hapt_profile_create(2, 1, arena, &profile));
    CHECK_OK(hapt_profile_add_cluster(profile, 0, "a", 1, 2, 100, 1, row, 3, arena));
    profile->layout_count = 1;
    profile->layout = layout;
    profile->link_bandwidth[0] = 1e9;
    for (int s = 0; s < 3; s++) {
        for (int i = 0; i < 2; i++) {
            for (int j = i; j < 2; j++) {
                const size_t cell = hapt_profile_index(profile, s, i, j);
                profile->cluster[0].stage_time[cell] = (j - i + 1) * (s == 0 ? 4 : s == 1 ? 2.5 : 2);
                profile->cluster[0].stage_forward_time[cell] = 0.3 * profile->cluster[0].stage_time[cell];
                profile->cluster[0].parameter_bytes[cell] = profile->cluster[0].activation_bytes[cell] = 1;
            }
        }
    }
    CHECK_OK(hapt_profile_check(profile));
    return profile;
}

static void check_same_sharding(const struct hapt_stage_layout *a, const struct hapt_stage_layout *b,
                                const struct hapt_graph *graph, struct hapt_arena *arena)
{
    struct hapt_sharding *x = NULL, *y = NULL;
    CHECK(hapt_stage_layout_same(a, b) && strcmp(a->name, b->name) == 0);
    CHECK_OK(hapt_stage_layout_apply(a, graph, arena, &x));
    CHECK_OK(hapt_stage_layout_apply(b, graph, arena, &y));
    if (!x || !y ||
        !CHECK(x->graph->tensor_count == y->graph->tensor_count && x->graph->op_count == y->graph->op_count))
        return;
    for (int rank = 0; rank < 2; rank++) {
        const int place[HAPT_MESH_AXES] = {a->axis[0].size > 1 ? rank : 0, a->axis[0].size > 1 ? 0 : rank};
        struct hapt_sharding *mine, *its;
        CHECK_OK(hapt_sharding_at(x, place, arena, &mine));
        CHECK_OK(hapt_sharding_at(y, place, arena, &its));
        for (int t = 0; t < mine->graph->tensor_count; t++)
            CHECK(memcmp(mine->shard->tensor[t].shape, its->shard->tensor[t].shape,
                         sizeof its->shard->tensor[t].shape) == 0);
    }
}

static void files_round_trip(void)
{
    struct hapt_arena arena;
    struct hapt_profile *read = NULL;
    struct hapt_plan *plan = NULL, *again = NULL;
    hapt_arena_init(&arena);
    const struct hapt_model *model = fixture_gpt(&arena, (struct fixture_gpt){2, 16, 2, 8, 32, 4, true, false});
    const struct hapt_stage_layout *layout = uneven(model->graph, &arena);
    CHECK_OK(hapt_profile_save(path_of("p.h5"), profile_of(&layout, &arena)));
    CHECK_OK(hapt_profile_load(path_of("p.h5"), &arena, &read));
    if (!read || !CHECK(read->layout_count == 1 && read->cluster[0].submesh[2].program == 1)) exit(1);
    check_same_sharding(layout, read->layout[0], model->graph, &arena);
    /* the layout's row is the fastest: the search takes it, a forced plan names it, files keep it */
    const struct hapt_search_options options = {.microbatches = 4, .schedule = HAPT_SCHEDULE_H1F1B};
    CHECK_OK(hapt_plan_search(MPI_COMM_SELF, read, &options, &arena, &plan));
    if (!plan || !CHECK(plan->stage_count == 1 && plan->stage[0].layout.number == 1 &&
                        plan->stage[0].layout.program == read->layout[0]))
        exit(1);
    CHECK_OK(hapt_plan_save(path_of("plan.h5"), plan));
    CHECK_OK(hapt_plan_load(path_of("plan.h5"), &arena, &again));
    if (again && CHECK(again->stage[0].layout.number == 1 && again->stage[0].layout.program))
        check_same_sharding(layout, again->stage[0].layout.program, model->graph, &arena);
    char text[HAPT_PLAN_STAGE_CHARS];
    CHECK(strcmp(hapt_plan_stage_text(&plan->stage[0], text), "0-2@a:1x2p1") == 0);
    CHECK_OK(hapt_plan_force(read, &options, text, &arena, &again));
    CHECK(again->stage[0].layout.number == 1 && again->stage[0].compute_s == plan->stage[0].compute_s);
    CHECK_OK(hapt_plan_force(read, &options, "0-2@a:1x2t1", &arena, &again));
    CHECK(again->stage[0].layout.number == 0 && !again->stage[0].layout.program &&
          again->stage[0].compute_s > plan->stage[0].compute_s);
    CHECK_FAILS(hapt_plan_force(read, &options, "0-2@a:1x2p2", &arena, &again), HAPT_ERR_INPUT);
    CHECK_FAILS(hapt_plan_force(read, &options, "0-2@a:1x2p0", &arena, &again), HAPT_ERR_INPUT);
    hapt_arena_release(&arena);
}

/* Two subclusters of one device each, and a mixed stage on both: by rows (3 s per layer), and with the layout (2 s)
 * with all devices along axis 0. */
static struct hapt_profile *mixed_profile(const struct hapt_stage_layout *const *layout, struct hapt_arena *arena)
{
    static const int cluster[2] = {0, 1}, devices[2] = {1, 1};
    static const struct hapt_submesh row[1] = {{1, 1, 1, 0, 0, 0}};
    struct hapt_profile *profile;
    CHECK_OK(hapt_profile_create(2, 2, arena, &profile));
    for (int c = 0; c < 2; c++)
        CHECK_OK(hapt_profile_add_cluster(profile, c, c ? "b" : "a", 1, 1, 100, 1, row, 1, arena));
    for (int l = 0; l < 4; l++) profile->link_bandwidth[l] = 1e9;
    profile->layout_count = 1;
    profile->layout = layout;
    for (int program = 0; program < 2; program++) {
        struct hapt_profile_mixed *mixed;
        CHECK_OK(hapt_profile_add_mixed(profile, 2, cluster, devices, arena, &mixed));
        mixed->program = program;
        for (int i = 0; i < 2; i++)
            for (int j = i; j < 2; j++) {
                const size_t cell = hapt_profile_index(profile, 0, i, j);
                mixed->stage_time[cell] = (j - i + 1) * (program ? 2 : 3);
                mixed->stage_forward_time[cell] = 1;
                for (int side = 0; side < 2; side++)
                    mixed->parameter_bytes[hapt_profile_index(profile, side, i, j)] =
                        mixed->activation_bytes[hapt_profile_index(profile, side, i, j)] = 1;
            }
    }
    CHECK_OK(hapt_profile_check(profile));
    return profile;
}

static struct hapt_stage_layout *along_axis_0(const struct hapt_graph *graph, struct hapt_arena *arena)
{
    static const double ratio[2] = {0.75, 0.25};
    struct hapt_stage_layout *layout = hapt_arena_alloc(arena, 1, sizeof *layout);
    struct hapt_sharding *one;
    CHECK_OK(hapt_sharding_trivial(graph, arena, &one));
    *layout = (struct hapt_stage_layout){.axis = {{.size = 2, .ratio_count = 1, .ratio = ratio}, {.size = 1}},
                                         .name = "of both"};
    layout->program[0] = by_rows(one, 0, &layout->axis[0], arena);
    return layout;
}

static void mixed_files_round_trip(void)
{
    struct hapt_arena arena;
    struct hapt_profile *read = NULL, *copy = NULL;
    struct hapt_plan *plan = NULL, *again = NULL;
    char text[HAPT_PLAN_STAGE_CHARS];
    hapt_arena_init(&arena);
    const struct hapt_model *model = fixture_gpt(&arena, (struct fixture_gpt){2, 16, 2, 8, 32, 4, true, false});
    const struct hapt_stage_layout *layout = along_axis_0(model->graph, &arena);
    const struct hapt_search_options options = {.microbatches = 4, .schedule = HAPT_SCHEDULE_H1F1B};
    CHECK_OK(hapt_profile_save(path_of("p.h5"), mixed_profile(&layout, &arena)));
    CHECK_OK(hapt_profile_load(path_of("p.h5"), &arena, &read));
    if (!read || !CHECK(read->mixed_count == 2 && read->mixed[0].program == 0 && read->mixed[1].program == 1)) exit(1);
    check_same_sharding(layout, read->layout[0], model->graph, &arena);
    CHECK_OK(hapt_plan_search(MPI_COMM_SELF, read, &options, &arena, &plan));
    if (!plan || !CHECK(plan->stage_count == 1 && plan->submesh[0].part_count > 1 && plan->stage[0].layout.number == 1))
        exit(1);
    CHECK(plan->stage[0].layout.program == read->layout[0]);
    CHECK_OK(hapt_plan_save(path_of("plan.h5"), plan));
    CHECK_OK(hapt_plan_load(path_of("plan.h5"), &arena, &again));
    if (again &&
        CHECK(again->submesh[0].part_count > 1 && again->stage[0].layout.number == 1 && again->stage[0].layout.program))
        check_same_sharding(layout, again->stage[0].layout.program, model->graph, &arena);
    /* forced: the faster one unless told */
    CHECK(strcmp(hapt_plan_stage_text(&plan->stage[0], text), "0-2@a:1+b:1p1") == 0);
    static const struct {
        const char *stages;
        int program;
    } forced[] = {{"0-2@a:1+b:1p1", 1}, {"0-2@a:1+b:1", 1}, {"0-2@a:1+b:1p0", 0}, {"0-2@b:1+a:1p0", 0}};
    for (int f = 0; f < 4; f++) {
        CHECK_OK(hapt_plan_force(read, &options, forced[f].stages, &arena, &again));
        CHECK(again->stage[0].layout.number == forced[f].program &&
              !again->stage[0].layout.program == !forced[f].program);
        CHECK(fabs(again->stage[0].compute_s - (forced[f].program ? 4 : 6)) < 1e-12);
    }
    static const char *const refused[] = {"0-2@a:1+b:1p2", "0-2@a:1+b:1p", "0-2@a:1p1+b:1", "0-2@a:1+b:1p1x",
                                          "0-2@a:1+b:1+"};
    for (int f = 0; f < 5; f++)
        CHECK_FAILS(hapt_plan_force(read, &options, refused[f], &arena, &again), HAPT_ERR_INPUT);
    /* --program keeps the named program */
    CHECK_OK(hapt_profile_copy(read, &arena, &copy));
    hapt_profile_keep_programs(copy, "data");
    CHECK(copy->mixed_count == 1 && copy->mixed[0].program == 0);
    CHECK_OK(hapt_profile_copy(read, &arena, &copy));
    hapt_profile_keep_programs(copy, "synthesised");
    CHECK(copy->mixed_count == 1 && copy->mixed[0].program == 1);
    hapt_arena_release(&arena);
}

static void mixed_programs_refused(void)
{
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    const struct hapt_model *model = fixture_gpt(&arena, (struct fixture_gpt){2, 16, 2, 8, 32, 4, true, false});
    const struct hapt_stage_layout *layout = along_axis_0(model->graph, &arena), *inner = uneven(model->graph, &arena);
    struct hapt_profile *profile = mixed_profile(&layout, &arena);
    const int wrong[] = {-1, 2, 4096, 0}; /* 0: twice the same program */
    for (int w = 0; w < 4; w++) {
        profile->mixed[1].program = wrong[w];
        CHECK_FAILS(hapt_profile_check(profile), HAPT_ERR_INPUT);
    }
    profile->mixed[1].program = 1;
    CHECK_OK(hapt_profile_check(profile));
    profile->layout = &inner; /* its devices are along axis 1 */
    CHECK_FAILS(hapt_profile_check(profile), HAPT_ERR_INPUT);
    struct hapt_stage_layout three = *layout;
    const struct hapt_stage_layout *larger = &three;
    three.axis[0].size = 3;
    profile->layout = &larger;
    CHECK_FAILS(hapt_profile_check(profile), HAPT_ERR_INPUT);
    hapt_arena_release(&arena);
}

/* One entry of an instruction is changed. It is refused when read or applied, or it is another valid sharding. */
static void hostile_instructions(void)
{
    static const int value[] = {-2, -1, 0, 1, 2, 7, 98, 1000, 1 << 20, (1 << 20) + 1, INT32_MAX, INT32_MIN};
    struct hapt_arena arena;
    int refused = 0, unproven = 0, allowed = 0;
    hapt_arena_init(&arena);
    const struct hapt_model *model = fixture_gpt(&arena, (struct fixture_gpt){1, 16, 2, 8, 32, 4, true, false});
    const struct hapt_stage_layout *layout = uneven(model->graph, &arena);
    const int64_t count = layout->program[1]->count;
    CHECK_OK(hapt_profile_save(path_of("p.h5"), profile_of(&layout, &arena)));
    struct hapt_h5 *file;
    int64_t shape[2] = {count, 17};
    void *data;
    CHECK_OK(hapt_h5_open(path_of("p.h5"), NULL, 1, true, &file));
    CHECK_OK(hapt_h5_read(file, "/program_1/axis_1_instructions", HAPT_H5_I32, 2, shape, count * 17, &arena, &data));
    hapt_h5_close(file);
    int32_t *table = data;
    const int axes[2] = {1, 2};
    for (int64_t cell = 0; cell < count * 17; cell += test_long() ? 1 : 13) {
        for (size_t v = 0; v < sizeof value / sizeof value[0]; v++) {
            struct hapt_stage_layout *read;
            struct hapt_sharding *sharding;
            struct hapt_arena own;
            const int32_t before = table[cell];
            if (value[v] == before) continue;
            table[cell] = value[v];
            hapt_arena_init(&own);
            CHECK_OK(hapt_h5_create(path_of("bad.h5"), "bad", 1, &file));
            CHECK_OK(hapt_h5_write(file, "/program_1/axis_1_instructions", HAPT_H5_I32, 2, shape, table, ""));
            CHECK_OK(hapt_h5_write_attribute_text(file, "/program_1", "name", "bad"));
            CHECK_OK(hapt_h5_write_attribute_ints(file, "/program_1", "axes", 2, axes));
            CHECK_OK(hapt_h5_commit(file));
            CHECK_OK(hapt_h5_open(path_of("bad.h5"), "bad", 1, false, &file));
            enum hapt_status status = hapt_stage_layout_read(file, "", 1, &own, &read);
            hapt_h5_close(file);
            CHECK(status == HAPT_OK || status == HAPT_ERR_INPUT);
            refused += status != HAPT_OK;
            if (status == HAPT_OK) {
                status = hapt_stage_layout_apply(read, model->graph, &own, &sharding);
                CHECK(status == HAPT_OK || status == HAPT_ERR_INFEASIBLE);
                unproven += status != HAPT_OK;
                allowed += status == HAPT_OK;
            }
            hapt_fail_reset();
            hapt_arena_release(&own);
            table[cell] = before;
        }
    }
    CHECK(refused > 100 && unproven > 20 && allowed > 0);
    printf("%d refused as read, %d by the rules, %d allowed\n", refused, unproven, allowed);
    hapt_arena_release(&arena);
}

static void profiles_refuse_programs_they_lack(void)
{
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    const struct hapt_model *model = fixture_gpt(&arena, (struct fixture_gpt){1, 16, 2, 8, 32, 4, true, false});
    const struct hapt_stage_layout *layout = uneven(model->graph, &arena);
    struct hapt_profile *profile = profile_of(&layout, &arena);
    profile->cluster[0].submesh[2].program = 2;
    CHECK_FAILS(hapt_profile_check(profile), HAPT_ERR_INPUT);
    profile->cluster[0].submesh[2].program = -1;
    CHECK_FAILS(hapt_profile_check(profile), HAPT_ERR_INPUT);
    profile->cluster[0].submesh[2] = (struct hapt_submesh){1, 1, 1, 1, 0, 0}; /* its mesh is 1 x 2 */
    CHECK_FAILS(hapt_profile_check(profile), HAPT_ERR_INPUT);
    hapt_arena_release(&arena);
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    snprintf(folder, sizeof folder, "/tmp/hapt-layout-test-%ld", (long)getpid());
    mkdir(folder, 0700);
    RUN(files_round_trip);
    RUN(mixed_files_round_trip);
    RUN(mixed_programs_refused);
    RUN(hostile_instructions);
    RUN(profiles_refuse_programs_they_lack);
    unlink(path_of("p.h5")), unlink(path_of("plan.h5")), unlink(path_of("bad.h5"));
    rmdir(folder);
    return test_finish();
}
