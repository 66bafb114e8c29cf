/* A model's graph, built again. Private to the model room. */
#ifndef HAPT_MODEL_REBUILD_H
#define HAPT_MODEL_REBUILD_H

#include "hapt/model.h"

struct hapt_graph_change {
    enum hapt_dtype dtype;  /* compute type of the new graph */
    int rows_from, rows_to; /* rows of a microbatch */
};

/* The new graph is checked and differentiated; old indices are invalid. HAPT_ERR_INPUT: shapes or types do not fit. */
enum hapt_status hapt_graph_rebuild(const struct hapt_graph *from, const struct hapt_graph_change *change,
                                    struct hapt_arena *arena, struct hapt_graph **to);

#endif
