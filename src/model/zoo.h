/* Builders of the zoo's families. Private to the model room. */
#ifndef HAPT_MODEL_ZOO_H
#define HAPT_MODEL_ZOO_H

#include "hapt/model.h"

/* Notes a hyper-parameter of the model; `value` is copied. */
enum hapt_status hapt_model_set(struct hapt_model *model, struct hapt_arena *arena, const char *name, const char *value);

/* Each fills settings, shape fields and the forward graph. */
enum hapt_status hapt_zoo_gpt(const struct hapt_config *config, struct hapt_arena *arena, struct hapt_model *model);

#endif
