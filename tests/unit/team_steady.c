/* A steady, slowed device: a pass takes the planned time, in parts if updates interrupt it. No rank computes here. */
#include <math.h>

#include "hapt/engine.h"
#include "hapt/team.h"
#include "test.h"

#define LATE_S 0.04 /* a busy machine may stop this process between two lines for less */

/* The parts of a pass of `planned_s` that stops after each share of its work. An interruption counts nowhere. */
static void parts(double planned_s, int stops, const double *share)
{
    struct hapt_team team = {.slowdown = 3, .size = 1};
    struct hapt_engine_links links;
    double before_s = 0, before = 0;
    hapt_team_links(&team, &links);
    team.microbatch = 2;
    hapt_team_set_steady(&team, planned_s);
    hapt_team_stretch_begin(&team);
    for (int k = 0; k < stops; k++) {
        links.leave(links.context, share[k]);
        CHECK_NEAR(team.times.device_s - before_s, (share[k] - before) * planned_s, LATE_S);
        before_s = team.times.device_s;
        before = share[k];
        links.updated(links.context, 1e-4);
        links.resume(links.context);
        CHECK(team.times.device_s == before_s && team.microbatch == 2);
    }
    hapt_team_stretch_end(&team);
    CHECK_NEAR(team.times.device_s, planned_s, LATE_S);
    hapt_team_stretch_begin(&team); /* the next pass has no planned time */
    hapt_team_stretch_end(&team);
    CHECK_NEAR(team.times.device_s, planned_s, LATE_S);
}

static void passes_take_the_planned_time(void)
{
    parts(0.2, 0, NULL);
    parts(0.2, 1, (const double[]){0});
    parts(0.2, 3, (const double[]){0, 0.3, 0.3});
    parts(0.2, 3, (const double[]){0.25, 0.5, 1});
}

/* Copies wait for kernels of an update as long as a slowed device would take. */
static void updates_are_slowed(void)
{
    struct hapt_team slow = {.slowdown = 4}, plain = {.slowdown = 1};
    struct hapt_engine_links links;
    hapt_team_links(&slow, &links);
    const double start_s = hapt_time_s();
    links.updated(links.context, 0.01);
    CHECK(hapt_time_s() - start_s >= 0.03);
    hapt_team_links(&plain, &links);
    links.updated(links.context, 1e6); /* does not wait */
}

int main(void)
{
    RUN(passes_take_the_planned_time);
    RUN(updates_are_slowed);
    return test_finish();
}
