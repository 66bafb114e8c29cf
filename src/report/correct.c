/* Corrects a profile by the stage times that a run measured, for the next plan. */
#include <math.h>
#include <string.h>

#include "hapt/report.h"

#define HINT "give the run file of a run (outputs/NAME/run.h5) and a profile, both of this model on this cluster"

#define MAX_RATIO 1e6 /* no real run differs by more */

/* The profile's candidate for a stage; -1: none. */
static long find_candidate(const struct hapt_profile *profile, int c, const struct hapt_plan_stage *stage)
{
    const struct hapt_profile_cluster *cluster = &profile->cluster[c];
    for (int s = 0; s < cluster->submesh_count; s++) {
        const struct hapt_submesh *submesh = &cluster->submesh[s];
        if (!hapt_plan_stage_runs(stage, submesh)) continue;
        const size_t candidate = hapt_profile_index(profile, s, stage->first_layer, stage->end_layer - 1);
        return isfinite(cluster->stage_time[candidate]) ? (long)candidate : -1;
    }
    return -1;
}

static int find_cluster(const struct hapt_profile *profile, const char *name)
{
    int c = profile->cluster_count - 1;
    while (c >= 0 && strcmp(profile->cluster[c].name, name) != 0) c--;
    return c;
}

static enum hapt_status add_stage(const struct hapt_report *report, const struct hapt_profile *profile, int i,
                                  double *measured_s, double *profiled_s)
{
    const struct hapt_plan_stage *stage = &report->plan->stage[i];
    char text[HAPT_PLAN_STAGE_CHARS];
    if (hapt_plan_is_mixed(stage)) return HAPT_OK;
    const int c = find_cluster(profile, stage->submesh->name);
    const long candidate = c >= 0 ? find_candidate(profile, c, stage) : -1;
    if (candidate < 0)
        return hapt_fail(HAPT_ERR_INPUT, HINT, "stage %d of the run, %s, is not a candidate of the profile", i,
                         hapt_plan_stage_text(stage, text));
    if (!(report->stage[i].microbatch_s > 0) || !isfinite(report->stage[i].microbatch_s))
        return hapt_fail(HAPT_ERR_INPUT, HINT, "the run has no measured microbatch time of stage %d", i);
    measured_s[c] += report->stage[i].microbatch_s;
    profiled_s[c] += profile->cluster[c].stage_time[candidate];
    return HAPT_OK;
}

static void scale(double *time_s, size_t candidates, double ratio)
{
    for (size_t candidate = 0; candidate < candidates; candidate++) time_s[candidate] *= ratio;
}

enum hapt_status hapt_report_correct(const struct hapt_report *report, struct hapt_profile *profile, double *ratio)
{
    double measured_s[HAPT_MAX_SUBCLUSTERS] = {0}, profiled_s[HAPT_MAX_SUBCLUSTERS] = {0};
    const int layers = report->plan->layer_count;
    if (layers != profile->layer_count)
        return hapt_fail(HAPT_ERR_INPUT, HINT, "the run has %d layers, the profile %d", layers, profile->layer_count);
    for (int i = 0; i < report->plan->stage_count; i++) HAPT_TRY(add_stage(report, profile, i, measured_s, profiled_s));
    for (int c = 0; c < profile->cluster_count; c++) {
        struct hapt_profile_cluster *cluster = &profile->cluster[c];
        const size_t candidates = hapt_profile_index(profile, cluster->submesh_count, 0, 0);
        ratio[c] = profiled_s[c] > 0 ? measured_s[c] / profiled_s[c] : 1;
        if (!(ratio[c] > 1 / MAX_RATIO && ratio[c] < MAX_RATIO))
            return hapt_fail(HAPT_ERR_INPUT, HINT, "stages of %s took %g times as long as the profile says",
                             cluster->name, ratio[c]);
        scale(cluster->stage_time, candidates, ratio[c]);
        scale(cluster->stage_forward_time, candidates, ratio[c]);
        if (cluster->weight_time) scale(cluster->weight_time, candidates, ratio[c]);
    }
    for (int k = 0; k < profile->mixed_count; k++) {
        struct hapt_profile_mixed *mixed = &profile->mixed[k];
        const size_t candidates = hapt_profile_index(profile, 1, 0, 0);
        double mean = 0;
        for (int i = 0; i < mixed->count; i++) mean += ratio[mixed->cluster[i]] / mixed->count;
        scale(mixed->stage_time, candidates, mean);
        scale(mixed->stage_forward_time, candidates, mean);
    }
    return HAPT_OK;
}
