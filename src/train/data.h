/* Reading data files into memory. Private to the train room. */
#ifndef HAPT_TRAIN_DATA_H
#define HAPT_TRAIN_DATA_H

#include "data_column.h"
#include "hapt/graph.h"
#include "hapt/h5.h"
#include "hapt/train.h"

/* The place of a dataset's elements: the mapped file, or (blocks 0) a copy. */
struct data_store {
    enum hapt_h5_type type;
    int64_t block, blocks; /* elements of a block of the file, and their number */
};

/* A dataset of rows that an input of the model names (HAPT_ROLE_FIELD). */
struct data_field {
    char name[HAPT_FIELD_CHARS + 16]; /* of the dataset: /batches/NAME */
    enum hapt_h5_type type;           /* I32 or F32 */
    int64_t width;                    /* elements of a row */
    int64_t limit;                    /* upper bound of integers, exclusive */
    bool target;                      /* it is compared by the loss, which ignores -100 and NaN */
    struct data_store store;
};

/*
 * Layout of the data. A unit is read as a whole: a step of exact batches, a token or an image of a stream. Row r of all
 * rows starts at element r * stride of the inputs and at element r * target_stride of the targets. In a stream of
 * tokens, rows start anywhere. Shifted: targets are the inputs shifted by one element. If the model has fields, these
 * hold all data, a row is one element of the inputs, and the stores of inputs and targets are unused.
 */
struct data_layout {
    bool exact, shifted, images;
    bool pixels;            /* images have a label for each of several places; -100: none */
    bool held_out;          /* any number of rows per batch; a batch may have no target */
    enum hapt_h5_type type; /* that holds the inputs: U8 or F32 (images), U16 or I32 (tokens) */
    int64_t units;
    int64_t unit_inputs, unit_targets; /* elements per unit */
    int64_t width, target_width;       /* elements of a row that the model reads */
    int64_t stride, target_stride;
    int64_t channels; /* of images, else 0 */
    int64_t limit;    /* upper bound of tokens, targets and labels, exclusive */
    struct data_store inputs, targets;
    int fields; /* 0: there are inputs and targets instead */
    struct data_field field[HAPT_MOST_FIELDS];
    int64_t file_bytes, file_device, file_number; /* of the mapped file (fstat) */
};

#define DATA_IGNORED (-100) /* target excluded from the loss */

enum { DATA_COUNT_UNITS = 256 };

/* The memory to fill: one copy per node. */
struct data_memory {
    void *inputs;                          /* NULL: mapped */
    int32_t *targets;                      /* NULL: mapped, or shifted */
    int64_t *input_offset, *target_offset; /* [blocks] of mapped datasets */
    int64_t *target_count; /* /targets beside batches, labels of pixels, fields: targets of each unit; /targets beside a
                              stream: those before each DATA_COUNT_UNITS units; else NULL */
    float *mean, *std;     /* [channels] a pixel's value is (stored - mean) / std */
    struct {
        void *value;     /* NULL: mapped */
        int64_t *offset; /* [blocks] of a mapped dataset */
    } field[HAPT_MOST_FIELDS];
};

/* Rows of tokens in this rank's memory, for the caller to fill: one step of `rows` rows of `width` tokens, with
 * documents that a token ends (-1: none). *row gets their [rows][width + 1] elements, all 0. hapt_data_close frees
 * them. */
enum hapt_status data_of_rows(int rows, int64_t width, int64_t document_end, struct hapt_data **data, int32_t **row);

/* Finds and checks the data in `file` for the steps and rows of `order`. NULL: for all rows of the file; then batches
 * may have any number of rows. One rank. */
enum hapt_status data_layout_find(struct hapt_h5 *file, const struct hapt_model *model,
                                  const struct hapt_data_order *order, struct data_layout *layout);
/* Elements of data_memory.target_count. */
int64_t data_target_counts(const struct data_layout *layout);
/* The number of different rows. */
int64_t data_layout_rows(const struct data_layout *layout);
/* ---- data_map.c ---- */

const char *data_inputs_name(const struct data_layout *layout);
const char *data_targets_name(const struct data_layout *layout);
/* Sets layout->inputs and targets: mapped if the elements stand in the file as they are needed. One rank. */
void data_choose_stores(struct hapt_h5 *file, struct data_layout *layout);
/* Fills the offsets of mapped datasets. One rank. */
enum hapt_status data_find_offsets(struct hapt_h5 *file, const struct data_layout *layout,
                                   const struct data_memory *memory);
/* Maps the file of the layout. False: it cannot be mapped, or it is another file (fstat). */
bool data_map(const char *path, const struct data_layout *layout, const char **base);
/* Checks that all tokens, targets, labels and integers of fields are within the model's range. One rank. */
enum hapt_status data_check_values(struct hapt_h5 *file, const struct data_layout *layout);
/* Reads and checks the values. One rank. */
enum hapt_status data_fill(struct hapt_h5 *file, const struct data_layout *layout, const struct data_memory *memory);

/* ---- data_read.c ---- */

/* Checks that batches of `shape`, [step][row]..., have `rows` rows (0: any number), and that there are `steps` of them.
 */
enum hapt_status data_check_steps(const char *path, const char *dataset, const int64_t *shape,
                                  const struct hapt_model *model, int rows, int64_t steps);
/* HAPT_ERR_INPUT: `rows` rows of `elements` are too many. */
enum hapt_status data_check_product(const char *path, int64_t rows, int64_t elements);
/* HAPT_ERR_INPUT: a batch has no target. [units] */
enum hapt_status data_check_counts(struct hapt_h5 *file, const struct data_layout *layout, const int64_t *count);
/* Takes elements [first, first + count) of a dataset that is read: I32 or F32, or U8 if it is read as that. */
struct data_reading {
    const struct data_layout *layout;
    const struct data_memory *memory; /* of a field never NULL; else NULL: they are only checked */
    int field;                        /* of the layout; -1: not a field */
};
typedef enum hapt_status data_take(const struct data_reading *reading, const void *read, int64_t first, int64_t count,
                                   const char *path);
/* Reads a dataset of layout->units rows of `width` elements block by block. */
enum hapt_status data_read_blocks(struct hapt_h5 *file, const char *dataset, enum hapt_h5_type type,
                                  const struct data_reading *reading, int64_t width, data_take *take);

/* ---- data_fields.c: the same for a model with fields ---- */

enum hapt_status data_fields_find(struct hapt_h5 *file, const struct hapt_model *model, int rows, int64_t steps,
                                  struct data_layout *layout);
enum hapt_status data_fields_fill(struct hapt_h5 *file, const struct data_layout *layout,
                                  const struct data_memory *memory);

#endif
