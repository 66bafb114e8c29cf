/* For devices whose memory the host cannot read (a back end with `pin`): collectives pass through a page-locked bounce
 * buffer. */
#include <stdlib.h>
#include <string.h>

#include "engine_private.h"
#include "hapt/config.h"

static size_t view_bytes(const struct hapt_view *view)
{
    return (size_t)hapt_view_elements(view) * hapt_dtype_bytes(view->dtype);
}

static size_t group_bytes(const struct hapt_parameter_group *group)
{
    return (group->end - group->first) * sizeof(float);
}

/* Bytes of the largest transfer of one collective; 0 on a single rank. */
static size_t bounce_bytes(const struct hapt_engine *engine)
{
    size_t most = 0;
    for (int section = 0; section < HAPT_SECTION_COUNT; section++)
        for (int s = 0; s < engine->section[section].step_count; s++) {
            const struct bound_step *step = &engine->section[section].step[s];
            const size_t bytes = hapt_align(view_bytes(&step->call.input[0])) + view_bytes(&step->call.output[0]);
            if (!step->kernel && bytes > most) most = bytes;
        }
    for (int g = 0; g < HAPT_PARAMETER_GROUPS; g++)
        if (engine->plan->group[g].axes != 0 && group_bytes(&engine->plan->group[g]) > most)
            most = group_bytes(&engine->plan->group[g]);
    return most;
}

static enum hapt_status reserve(const struct hapt_engine *engine, size_t bytes, char **memory)
{
    void *made;
    if (bytes == 0) return HAPT_OK;
    HAPT_TRY(hapt_backend_pin(engine->options.backend, bytes, &made));
    *memory = memset(made, 0, bytes); /* zeroed, as device memory is */
    return HAPT_OK;
}

enum hapt_status hapt_engine_connect(struct hapt_engine *engine, bool on_device)
{
    engine->options.links.on_device = on_device;
    if (!engine->options.backend->pin || !engine->options.links.collective || on_device || engine->bounce)
        return HAPT_OK;
    return reserve(engine, bounce_bytes(engine), &engine->bounce);
}

enum hapt_status hapt_engine_reserve_state(const struct hapt_backend *backend, size_t bytes, char **memory)
{
    char have[32], need[32];
    void *made = NULL;
    if (bytes == 0) return HAPT_OK;
    const double left = hapt_memory_available();
    if ((double)bytes <= left && !backend->pin) made = aligned_alloc(hapt_align(1), bytes);
    if ((double)bytes <= left && backend->pin) HAPT_TRY(hapt_backend_pin(backend, bytes, &made));
    if (!made)
        return hapt_fail(HAPT_ERR_MEMORY, "use fewer ranks on this host, or --offload no",
                         "the optimizer state needs %s of host memory on this rank, but the host has %s left",
                         hapt_units_bytes((double)bytes, need), hapt_units_bytes(left, have));
    *memory = memset(made, 0, bytes);
    return HAPT_OK;
}

void hapt_engine_release_state(const struct hapt_backend *backend, char *memory)
{
    if (memory && backend->pin)
        backend->unpin(memory);
    else
        free(memory);
}

void hapt_engine_release_host(struct hapt_engine *engine)
{
    if (engine->bounce) engine->options.backend->unpin(engine->bounce);
}

static enum hapt_status copy(struct hapt_engine *engine, void *to, const void *from, size_t bytes)
{
    return engine->options.backend->copy(engine->queue, to, from, bytes);
}

enum hapt_status hapt_engine_run_collective(struct hapt_engine *engine, const struct bound_step *step)
{
    const struct hapt_engine_links *links = &engine->options.links;
    const struct hapt_view *in = &step->call.input[0], *out = &step->call.output[0];
    HAPT_ASSERT(engine->bounce || links->on_device || !engine->options.backend->pin);
    if (!engine->bounce) return links->collective(links->context, step->op, in->data, out->data);
    char *from = engine->bounce, *to = in->data == out->data ? from : from + hapt_align(view_bytes(in));
    HAPT_TRY(copy(engine, from, in->data, view_bytes(in)));
    HAPT_TRY(hapt_engine_finish(engine));
    HAPT_TRY(links->collective(links->context, step->op, from, to));
    return copy(engine, out->data, to, view_bytes(out));
}

enum hapt_status hapt_engine_to_host(struct hapt_engine *engine, float **block, size_t elements)
{
    if (!engine->bounce) return HAPT_OK;
    HAPT_TRY(copy(engine, engine->bounce, *block, elements * sizeof **block));
    *block = (float *)engine->bounce;
    return hapt_engine_finish(engine);
}

enum hapt_status hapt_engine_from_host(struct hapt_engine *engine, float *block, const float *host, size_t elements)
{
    return block == host ? HAPT_OK : copy(engine, block, host, elements * sizeof *block);
}
