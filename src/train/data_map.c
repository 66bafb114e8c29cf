/* Maps data files whose elements stand there as they are needed. */
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data.h"

const char *data_inputs_name(const struct data_layout *layout)
{
    return layout->images ? "/images" : layout->exact ? "/batches" : "/tokens";
}

const char *data_targets_name(const struct data_layout *layout)
{
    return layout->images ? "/labels" : "/targets";
}

bool data_map(const char *path, const struct data_layout *layout, const char **base)
{
    struct stat now;
    const int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    const bool same = descriptor >= 0 && fstat(descriptor, &now) == 0 && (int64_t)now.st_size == layout->file_bytes &&
                      (int64_t)now.st_dev == layout->file_device && (int64_t)now.st_ino == layout->file_number;
    void *memory = same ? mmap(NULL, (size_t)now.st_size, PROT_READ, MAP_SHARED, descriptor, 0) : MAP_FAILED;
    if (descriptor >= 0) close(descriptor);
    if (memory == MAP_FAILED) return false;
    *base = memory;
    return true;
}

/* Notes the open file in the layout. False: this machine cannot map it. */
static bool can_map(struct hapt_h5 *file, struct data_layout *layout)
{
    const char *base;
    hapt_h5_file_identity(file, &layout->file_bytes, &layout->file_device, &layout->file_number);
    if (!data_map(hapt_h5_path(file), layout, &base)) return false;
    munmap((void *)base, (size_t)layout->file_bytes);
    return true;
}

/* `whole`: any integers will do, else `type` alone. */
static void choose_store(struct hapt_h5 *file, const char *name, int64_t file_bytes, enum hapt_h5_type type, bool whole,
                         struct data_store *store)
{
    struct hapt_h5_blocks blocks;
    *store = (struct data_store){.type = type};
    if (file_bytes == 0 || !hapt_h5_find_blocks(file, name, &blocks)) return;
    if (blocks.type != type && (!whole || blocks.type == HAPT_H5_F32)) return;
    int64_t *offset = malloc((size_t)blocks.count * sizeof *offset);
    if (offset && hapt_h5_block_offsets(file, name, &blocks, file_bytes, offset))
        *store = (struct data_store){blocks.type, blocks.elements, blocks.count};
    free(offset);
}

void data_choose_stores(struct hapt_h5 *file, struct data_layout *layout)
{
    if (!can_map(file, layout)) layout->file_bytes = 0;
    for (int f = 0; f < layout->fields; f++) {
        struct data_field *field = &layout->field[f];
        choose_store(file, field->name, layout->file_bytes, field->type, field->type == HAPT_H5_I32, &field->store);
    }
    if (layout->fields > 0) return;
    choose_store(file, data_inputs_name(layout), layout->file_bytes, layout->type, !layout->images, &layout->inputs);
    if (layout->images || !layout->shifted)
        choose_store(file, data_targets_name(layout), layout->file_bytes, HAPT_H5_I32, true, &layout->targets);
}

static enum hapt_status offsets_of(struct hapt_h5 *file, const char *name, const struct data_layout *layout,
                                   const struct data_store *store, int64_t *offset)
{
    const struct hapt_h5_blocks blocks = {store->type, store->block, store->blocks};
    if (store->blocks == 0 || hapt_h5_block_offsets(file, name, &blocks, layout->file_bytes, offset)) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT, "do not change the file while it is read", "%s: %s has changed",
                     hapt_h5_path(file), name);
}

enum hapt_status data_find_offsets(struct hapt_h5 *file, const struct data_layout *layout,
                                   const struct data_memory *memory)
{
    for (int f = 0; f < layout->fields; f++)
        HAPT_TRY(offsets_of(file, layout->field[f].name, layout, &layout->field[f].store, memory->field[f].offset));
    if (layout->fields > 0) return HAPT_OK;
    HAPT_TRY(offsets_of(file, data_inputs_name(layout), layout, &layout->inputs, memory->input_offset));
    return offsets_of(file, data_targets_name(layout), layout, &layout->targets, memory->target_offset);
}
