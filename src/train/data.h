/* Reading data files into memory. Private to the train room. */
#ifndef HAPT_TRAIN_DATA_H
#define HAPT_TRAIN_DATA_H

#include "hapt/h5.h"
#include "hapt/train.h"

/*
 * Layout of the data in memory. A unit is read as a whole: a step of exact batches, a token or an image of a stream.
 * Row r of all rows starts at element r * stride of the inputs and at element r * target_width of the targets. In a
 * stream of tokens, rows start anywhere. Shifted: targets are the inputs shifted by one element.
 */
struct data_layout {
    bool exact, shifted, images;
    bool held_out;          /* any number of rows per batch; a batch may have no target */
    enum hapt_h5_type type; /* of the inputs in memory: U8 or F32 (images), U16 or I32 (tokens) */
    int64_t units;
    int64_t unit_inputs, unit_targets; /* elements per unit */
    int64_t width, target_width;       /* elements of a row that the model reads */
    int64_t stride;
    int64_t channels; /* of images, else 0 */
    int64_t limit;    /* upper bound of tokens, targets and labels, exclusive */
};

#define DATA_IGNORED (-100) /* target excluded from the loss */

/* The memory to fill: one copy per node. */
struct data_memory {
    void *inputs;
    int32_t *targets;      /* NULL when shifted */
    int64_t *target_count; /* [units] for batches with /targets, else NULL */
    float *mean, *std;     /* [channels] a pixel's value is (stored - mean) / std */
};

/* Rows of tokens in this rank's memory, for the caller to fill: one step of `rows` rows of `width` tokens. *row gets
 * their [rows][width + 1] elements, all 0. hapt_data_close frees them. */
enum hapt_status data_of_rows(int rows, int64_t width, struct hapt_data **data, int32_t **row);

/* Finds and checks the data in `file` for `steps` steps of `rows` rows. rows 0: for all rows of the file; then batches
 * may have any number of rows. One rank. */
enum hapt_status data_layout_find(struct hapt_h5 *file, const struct hapt_model *model, int rows, int64_t steps,
                                  struct data_layout *layout);
/* Checks that all tokens, targets and labels are within the model's range. One rank. */
enum hapt_status data_check_values(struct hapt_h5 *file, const struct data_layout *layout);
/* Reads and checks the values. One rank. */
enum hapt_status data_fill(struct hapt_h5 *file, const struct data_layout *layout, const struct data_memory *memory);

#endif
