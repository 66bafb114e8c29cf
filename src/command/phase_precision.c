/* What the model computes in: as --precision says, as a checkpoint, plan or profile was made, or as suits the devices.
 */
#include <string.h>

#include "hapt/device.h"
#include "phases.h"

/* What files were made in. */
struct made_in {
    enum hapt_precision checkpoint, plan, profile;
};

static bool is_cpu(const struct hapt_device_spec *device)
{
    return strcmp(device->backend, "cpu") == 0;
}

/* TF32 came with bf16, and fp16 before both. */
static bool computes(const struct hapt_device_spec *device, enum hapt_precision precision)
{
    if (precision == HAPT_PRECISION_FP32) return true;
    if (is_cpu(device)) return precision == HAPT_PRECISION_BF16;
    return device->peak_flops[HAPT_BF16] > 0 || (precision == HAPT_PRECISION_FP16 && device->peak_flops[HAPT_F16] > 0);
}

/* The first device that lacks it, or NULL. */
static const struct hapt_device_spec *lacking(const struct hapt_cluster *cluster, enum hapt_precision precision)
{
    for (int c = 0; cluster && c < cluster->count; c++)
        if (!computes(&cluster->subcluster[c].device, precision)) return &cluster->subcluster[c].device;
    return NULL;
}

static bool has_gpus(const struct hapt_cluster *cluster)
{
    bool any = false;
    for (int c = 0; cluster && c < cluster->count; c++) any = any || !is_cpu(&cluster->subcluster[c].device);
    return any;
}

/* CPUs compute in the model's own type. GPUs, here or on paper, in 16 bits: bf16, or fp16 where one of them has no
 * bf16. */
static enum hapt_precision suitable(const struct hapt_env *env, const struct hapt_cluster *cluster,
                                    enum hapt_precision own)
{
    if (!has_gpus(cluster) || own == HAPT_PRECISION_FP16) return own;
    const struct hapt_device_spec *without = lacking(cluster, HAPT_PRECISION_BF16);
    if (!without) {
        if (own != HAPT_PRECISION_BF16)
            hapt_note(env, "on GPUs the model computes in bf16, sums in fp32 (--precision fp32: all in fp32)\n");
        return HAPT_PRECISION_BF16;
    }
    if (!lacking(cluster, HAPT_PRECISION_FP16)) {
        hapt_note(env, "%s has no bf16: the model computes in fp16, with a loss scale (--precision fp32: in fp32)\n",
                  without->name);
        return HAPT_PRECISION_FP16;
    }
    if (own != HAPT_PRECISION_FP32)
        hapt_note(env, "no type of 16 bits is common to all devices: the model computes in fp32\n");
    return HAPT_PRECISION_FP32;
}

/* What was asked for, or what a run goes on in, must be there; TF32 at least somewhere, other GPUs then compute in
 * fp32. */
static enum hapt_status check_devices(const struct hapt_env *env, const struct hapt_cluster *cluster,
                                      enum hapt_precision precision, const char *who)
{
    const struct hapt_device_spec *without = lacking(cluster, precision);
    bool any = false, all_gpus = true;
    if (!without) return HAPT_OK;
    for (int c = 0; c < cluster->count; c++) {
        any = any || computes(&cluster->subcluster[c].device, precision);
        all_gpus = all_gpus && !is_cpu(&cluster->subcluster[c].device);
    }
    if (precision == HAPT_PRECISION_TF32 && any && all_gpus) {
        hapt_note(env, "%s has no TF32: it computes in fp32\n", without->name);
        return HAPT_OK;
    }
    return hapt_fail(
        HAPT_ERR_INPUT,
        is_cpu(without)
            ? "CPUs compute in fp32 and bf16: give --precision fp32 or bf16"
            : "GPUs before compute capability 8.0 compute in fp32 and fp16: leave out --precision, or give one of them",
        "%s %s, which %s does not have", who, hapt_precision_name(precision), without->name);
}

static enum hapt_status read_files(const struct hapt_env *env, const struct hapt_config *config,
                                   const struct hapt_checkpoint *checkpoint, struct made_in *made)
{
    const char *plan = hapt_config_text(config, "plan"), *profile = hapt_config_text(config, "profile");
    const bool keeps = checkpoint && !hapt_config_bool(config, "replan");
    int found[2] = {HAPT_PRECISION_UNKNOWN, HAPT_PRECISION_UNKNOWN};
    enum hapt_status status = HAPT_OK;
    *made = (struct made_in){.checkpoint = checkpoint ? checkpoint->plan->precision : HAPT_PRECISION_UNKNOWN};
    if (env->world_rank == 0) {
        if (plan && !keeps) status = hapt_plan_precision(plan, &made->plan);
        if (profile && !plan && !keeps && status == HAPT_OK) status = hapt_profile_precision(profile, &made->profile);
        found[0] = (int)made->plan;
        found[1] = (int)made->profile;
    }
    HAPT_TRY(hapt_env_agree(env->world, status));
    HAPT_MPI(MPI_Bcast(found, 2, MPI_INT, 0, env->world));
    made->plan = keeps ? made->checkpoint : (enum hapt_precision)found[0];
    made->profile = (enum hapt_precision)found[1];
    return HAPT_OK;
}

/* A checkpoint of a version that did not tell was of a model in its own type. */
static enum hapt_status choose(const struct hapt_env *env, const struct hapt_config *config,
                               const struct hapt_cluster *cluster, const struct hapt_model *model, bool resumed,
                               const struct made_in *made, enum hapt_precision *chosen)
{
    const enum hapt_precision asked = hapt_precision_find(hapt_config_text(config, "precision"));
    if (asked != HAPT_PRECISION_UNKNOWN) {
        *chosen = asked;
        HAPT_TRY(check_devices(env, cluster, *chosen, "--precision asks for"));
    } else if (resumed) {
        *chosen = made->checkpoint != HAPT_PRECISION_UNKNOWN ? made->checkpoint : model->precision;
        HAPT_TRY(check_devices(env, cluster, *chosen, "the checkpoint was trained in"));
    } else if (made->plan != HAPT_PRECISION_UNKNOWN) {
        *chosen = made->plan;
        HAPT_TRY(check_devices(env, cluster, *chosen, "the plan was made for"));
    } else if (made->profile != HAPT_PRECISION_UNKNOWN) {
        *chosen = made->profile;
        HAPT_TRY(check_devices(env, cluster, *chosen, "the profile was made in"));
    } else {
        *chosen = suitable(env, cluster, model->precision);
    }
    if (made->profile != HAPT_PRECISION_UNKNOWN && made->profile != *chosen)
        return hapt_fail(HAPT_ERR_USAGE, "profile the model again with that --precision",
                         "%s is a profile in %s, and the model is to compute in %s",
                         hapt_config_text(config, "profile"), hapt_precision_name(made->profile),
                         hapt_precision_name(*chosen));
    if (made->plan != HAPT_PRECISION_UNKNOWN && made->plan != *chosen)
        hapt_warn(env,
                  "the plan was made for %s, the model computes in %s: its times and memory are another precision's\n",
                  hapt_precision_name(made->plan), hapt_precision_name(*chosen));
    return HAPT_OK;
}

enum hapt_status hapt_phase_precision(struct hapt_env *env, const struct hapt_config *config,
                                      struct hapt_cluster *cluster, const struct hapt_checkpoint *checkpoint,
                                      struct hapt_model *model)
{
    struct made_in made;
    enum hapt_precision chosen = model->precision;
    HAPT_TRY(read_files(env, config, checkpoint, &made));
    enum hapt_status status = choose(env, config, cluster, model, checkpoint != NULL, &made, &chosen);
    if (status == HAPT_OK) status = hapt_model_compute_in(model, chosen);
    for (int c = 0; cluster && c < cluster->count; c++) {
        struct hapt_device_spec *device = &cluster->subcluster[c].device;
        device->tf32 = chosen == HAPT_PRECISION_TF32 && computes(device, chosen);
        const struct hapt_backend *backend = hapt_backend_find(hapt_device_backend(device));
        if (device->tf32 && backend && backend->use_tf32) backend->use_tf32(true);
    }
    return hapt_env_agree(env->world, status);
}
