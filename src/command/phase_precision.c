/* Chooses the precision: --precision, else that of the checkpoint, plan or profile, else one that suits the devices. */
#include <string.h>

#include "hapt/device.h"
#include "phases.h"

/* Precisions of the input files. */
struct file_precisions {
    enum hapt_precision checkpoint, plan, profile;
};

static bool is_cpu(const struct hapt_device_spec *device)
{
    return strcmp(device->backend, "cpu") == 0;
}

/* GPUs with bf16 also have TF32 and fp16; older ones may have fp16 only. */
static bool computes(const struct hapt_device_spec *device, enum hapt_precision precision)
{
    if (precision == HAPT_PRECISION_FP32) return true;
    if (is_cpu(device)) return precision == HAPT_PRECISION_BF16;
    return device->peak_flops[HAPT_BF16] > 0 || (precision == HAPT_PRECISION_FP16 && device->peak_flops[HAPT_F16] > 0);
}

/* The first device without that precision, or NULL. */
static const struct hapt_device_spec *first_device_without(const struct hapt_cluster *cluster,
                                                           enum hapt_precision precision)
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

/* Default precision. CPUs: the model's own. GPUs, also on paper: bf16, or fp16 if one of them has no bf16. */
static enum hapt_precision default_precision(const struct hapt_env *env, const struct hapt_cluster *cluster,
                                             enum hapt_precision own)
{
    if (!has_gpus(cluster) || own == HAPT_PRECISION_FP16) return own;
    const struct hapt_device_spec *without = first_device_without(cluster, HAPT_PRECISION_BF16);
    if (!without) {
        if (own != HAPT_PRECISION_BF16)
            hapt_note(env, "on GPUs the model computes in bf16, with sums in fp32 (--precision fp32: all in fp32)\n");
        return HAPT_PRECISION_BF16;
    }
    if (!first_device_without(cluster, HAPT_PRECISION_FP16)) {
        hapt_note(env, "%s has no bf16: the model computes in fp16, with a loss scale (--precision fp32: in fp32)\n",
                  without->name);
        return HAPT_PRECISION_FP16;
    }
    if (own != HAPT_PRECISION_FP32)
        hapt_note(env, "the devices have no common 16-bit type: the model computes in fp32\n");
    return HAPT_PRECISION_FP32;
}

/* HAPT_ERR_INPUT if a device lacks the precision. TF32 needs one GPU with it; other GPUs then compute in fp32. */
static enum hapt_status check_devices(const struct hapt_env *env, const struct hapt_cluster *cluster,
                                      enum hapt_precision precision, const char *who)
{
    const struct hapt_device_spec *without = first_device_without(cluster, precision);
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
                                   const struct hapt_checkpoint *checkpoint, struct file_precisions *files)
{
    const char *plan = hapt_config_text(config, "plan"), *profile = hapt_config_text(config, "profile");
    const bool keeps = checkpoint && !hapt_config_bool(config, "replan");
    int found[2] = {HAPT_PRECISION_UNKNOWN, HAPT_PRECISION_UNKNOWN};
    enum hapt_status status = HAPT_OK;
    *files = (struct file_precisions){.checkpoint = checkpoint ? checkpoint->plan->precision : HAPT_PRECISION_UNKNOWN};
    if (env->world_rank == 0) {
        if (plan && !keeps) status = hapt_plan_precision(plan, &files->plan);
        if (profile && !plan && !keeps && status == HAPT_OK) status = hapt_profile_precision(profile, &files->profile);
        found[0] = (int)files->plan;
        found[1] = (int)files->profile;
    }
    HAPT_TRY(hapt_env_agree(env->world, status));
    HAPT_MPI(MPI_Bcast(found, 2, MPI_INT, 0, env->world));
    files->plan = keeps ? files->checkpoint : (enum hapt_precision)found[0];
    files->profile = (enum hapt_precision)found[1];
    return HAPT_OK;
}

/* Old checkpoints have no precision; their models were trained in their own type. */
static enum hapt_status choose(const struct hapt_env *env, const struct hapt_config *config,
                               const struct hapt_cluster *cluster, const struct hapt_model *model, bool resumed,
                               const struct file_precisions *files, enum hapt_precision *chosen)
{
    const enum hapt_precision asked = hapt_precision_find(hapt_config_text(config, "precision"));
    if (asked != HAPT_PRECISION_UNKNOWN) {
        *chosen = asked;
        HAPT_TRY(check_devices(env, cluster, *chosen, "--precision asks for"));
    } else if (resumed) {
        *chosen = files->checkpoint != HAPT_PRECISION_UNKNOWN ? files->checkpoint : model->precision;
        HAPT_TRY(check_devices(env, cluster, *chosen, "the checkpoint was trained in"));
    } else if (files->plan != HAPT_PRECISION_UNKNOWN) {
        *chosen = files->plan;
        HAPT_TRY(check_devices(env, cluster, *chosen, "the plan was made for"));
    } else if (files->profile != HAPT_PRECISION_UNKNOWN) {
        *chosen = files->profile;
        HAPT_TRY(check_devices(env, cluster, *chosen, "the profile was made in"));
    } else {
        *chosen = default_precision(env, cluster, model->precision);
    }
    if (files->profile != HAPT_PRECISION_UNKNOWN && files->profile != *chosen)
        return hapt_fail(HAPT_ERR_USAGE, "profile the model again with --precision",
                         "%s is a profile in %s, but the model computes in %s", hapt_config_text(config, "profile"),
                         hapt_precision_name(files->profile), hapt_precision_name(*chosen));
    if (files->plan != HAPT_PRECISION_UNKNOWN && files->plan != *chosen)
        hapt_warn(env, "the plan was made for %s, the model computes in %s: the plan's times and memory do not apply\n",
                  hapt_precision_name(files->plan), hapt_precision_name(*chosen));
    return HAPT_OK;
}

enum hapt_status hapt_phase_precision(struct hapt_env *env, const struct hapt_config *config,
                                      struct hapt_cluster *cluster, const struct hapt_checkpoint *checkpoint,
                                      struct hapt_model *model)
{
    struct file_precisions files;
    enum hapt_precision chosen = model->precision;
    HAPT_TRY(read_files(env, config, checkpoint, &files));
    enum hapt_status status = choose(env, config, cluster, model, checkpoint != NULL, &files, &chosen);
    if (status == HAPT_OK) status = hapt_model_compute_in(model, chosen);
    for (int c = 0; cluster && c < cluster->count; c++) {
        struct hapt_device_spec *device = &cluster->subcluster[c].device;
        device->tf32 = chosen == HAPT_PRECISION_TF32 && computes(device, chosen);
        const struct hapt_backend *backend = hapt_backend_find(hapt_device_backend(device));
        if (device->tf32 && backend && backend->use_tf32) backend->use_tf32(true);
    }
    return hapt_env_agree(env->world, status);
}
