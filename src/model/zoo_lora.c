/*
 * LoRA (Hu et al. 2021): beside a frozen linear layer y = x W' run two thin ones, y += alpha / rank * (x A') B'. B
 * begins with zeros. A share of x may be dropped before A. Names are PEFT's: NAME.lora_A.weight [rank][in],
 * NAME.lora_B.weight [out][rank].
 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "zoo.h"

enum { MAX_TARGETS = 256, MAX_RANK = 65536 };

static enum hapt_status bad_option(const char *text, const char *what)
{
    return hapt_fail(HAPT_ERR_USAGE, "write rank=16,alpha=32,dropout=0.05,target=q_proj,v_proj", "--lora %s: %s", text,
                     what);
}

static enum hapt_status add_target(struct hapt_lora *lora, struct hapt_arena *arena, const char *text, const char *name)
{
    if (!*name || strlen(name) > 60 || strlen(lora->targets) + strlen(name) + 2 > MAX_TARGETS)
        return bad_option(text, "a target is the last part of a layer's name");
    char *joined = hapt_arena_printf(arena, "%s%s%s", lora->targets, *lora->targets ? "," : "", name);
    if (!joined) return HAPT_ERR_MEMORY;
    lora->targets = joined;
    return HAPT_OK;
}

enum hapt_status hapt_lora_parse(const char *text, struct hapt_arena *arena, struct hapt_lora *lora)
{
    char *list = hapt_arena_strdup(arena, text), *rest = NULL, *end = list;
    *lora = (struct hapt_lora){.targets = ""};
    if (!list) return HAPT_ERR_MEMORY;
    for (char *part = strtok_r(list, ",", &rest); part; part = strtok_r(NULL, ",", &rest)) {
        if (strncmp(part, "rank=", 5) == 0) {
            lora->rank = strtoll(part + 5, &end, 10);
            if (*end || lora->rank < 1 || lora->rank > MAX_RANK)
                return bad_option(text, "the rank is a number from 1 to 65536");
        } else if (strncmp(part, "alpha=", 6) == 0) {
            lora->alpha = strtod(part + 6, &end);
            if (*end || !(lora->alpha > 0) || !isfinite(lora->alpha))
                return bad_option(text, "alpha is a positive number");
        } else if (strncmp(part, "dropout=", 8) == 0) {
            lora->dropout = strtod(part + 8, &end);
            if (end == part + 8 || *end || !(lora->dropout >= 0 && lora->dropout < 1))
                return bad_option(text, "dropout is a share from 0 to below 1");
        } else if (strncmp(part, "target=", 7) == 0) {
            HAPT_TRY(add_target(lora, arena, text, part + 7));
        } else if (*lora->targets && !strchr(part, '=')) {
            HAPT_TRY(add_target(lora, arena, text, part));
        } else {
            return bad_option(text, "only rank, alpha, dropout and target are known");
        }
    }
    if (lora->rank == 0) return bad_option(text, "the rank is missing");
    if (!*lora->targets) return bad_option(text, "a target is missing");
    if (lora->alpha == 0) lora->alpha = (double)lora->rank; /* a factor of 1 */
    return HAPT_OK;
}

enum hapt_status zoo_record_lora(const struct zoo *zoo, const struct hapt_config *config, struct hapt_arena *arena,
                                 struct hapt_model *model)
{
    if (!zoo->lora) return HAPT_OK;
    if (zoo->lora->layers == 0)
        return bad_option(hapt_config_text(config, "lora"), "no layer of the model is a target");
    return hapt_model_set(model, arena, "lora", hapt_config_text(config, "lora"));
}

bool hapt_is_adapter(const char *parameter)
{
    const size_t length = strlen(parameter);
    static const char *const ends[] = {".lora_A.weight", ".lora_B.weight"};
    for (int i = 0; i < 2; i++)
        if (length > strlen(ends[i]) && strcmp(parameter + length - strlen(ends[i]), ends[i]) == 0) return true;
    return false;
}

static bool is_target(const struct hapt_lora *lora, const char *prefix)
{
    const char *dot = strrchr(prefix, '.'), *name = dot ? dot + 1 : prefix;
    const size_t length = strlen(name);
    for (const char *at = lora->targets; at && *at;) {
        const char *comma = strchr(at, ',');
        const size_t size = comma ? (size_t)(comma - at) : strlen(at);
        if (size == length && strncmp(at, name, length) == 0) return true;
        at = comma ? comma + 1 : NULL;
    }
    return false;
}

enum hapt_status zoo_adapt(struct zoo *zoo, const char *prefix, int64_t in, int64_t out, int x, int *y)
{
    struct hapt_lora *lora = zoo->lora;
    if (!lora || !is_target(lora, prefix)) return HAPT_OK;
    const double factor[HAPT_MAX_ATTRIBUTES] = {lora->alpha / (double)lora->rank};
    char name[256];
    int input[3] = {x, 0, -1}, h;
    lora->layers++;
    snprintf(name, sizeof name, "%s.lora_dropout", prefix);
    HAPT_TRY(zoo_drop(zoo, name, lora->dropout, x, &input[0]));
    snprintf(name, sizeof name, "%s.lora_A.weight", prefix);
    HAPT_TRY(zoo_normal(zoo, name, 2, (int64_t[]){lora->rank, in}, 1 / sqrt(3 * (double)in), &input[1]));
    snprintf(name, sizeof name, "%s.lora_A", prefix);
    HAPT_TRY(hapt_graph_add_op(zoo->graph, "linear_t", name, input, 3, NULL, NULL, &h));
    snprintf(name, sizeof name, "%s.lora_B.weight", prefix);
    HAPT_TRY(zoo_parameter(zoo, name, 2, (int64_t[]){out, lora->rank}, HAPT_INIT_ZERO, 0, &input[1]));
    snprintf(name, sizeof name, "%s.lora_B", prefix);
    input[0] = h;
    HAPT_TRY(hapt_graph_add_op(zoo->graph, "linear_t", name, input, 3, NULL, NULL, &h));
    snprintf(name, sizeof name, "%s.lora_scale", prefix);
    HAPT_TRY(hapt_graph_add_op(zoo->graph, "scale", name, &h, 1, NULL, factor, &h));
    snprintf(name, sizeof name, "%s.lora_sum", prefix);
    return zoo_add(zoo, name, *y, h, y);
}
