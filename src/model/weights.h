/* Weights in HDF5 files. Private to the model room. */
#ifndef HAPT_MODEL_WEIGHTS_H
#define HAPT_MODEL_WEIGHTS_H

#include "hapt/model.h"
#include "hapt/h5.h"

/* Reads rows [first, first + count) of /parameters/NAME of a model or weights file; those of a stack (graph.h) are its
 * elements. HAPT_ERR_INPUT: missing, another shape, or not finite. */
enum hapt_status hapt_weights_read(struct hapt_h5 *file, const struct hapt_tensor *parameter, int64_t first,
                                   int64_t count, float *value);

/* True if the file holds /parameters/NAME of a parameter that is no stack. */
bool hapt_weights_exist(struct hapt_h5 *file, const struct hapt_tensor *parameter);

/* Checks the data of `path` that the model learns from, and copies them into the model's file. */
enum hapt_status hapt_model_copy_data(struct hapt_h5 *file, const struct hapt_model *model, const char *path,
                                      struct hapt_arena *arena);

#endif
