/* Event files for TensorBoard: OUTPUT/tensorboard/events.out.tfevents.TIME.HOST, one for each start of a run.
 *
 * A file is a sequence of TFRecords (length, masked CRC32C of the length, data, masked CRC32C of the data), whose data
 * are messages Event in the encoding of protocol buffers (tensorflow/core/util/event.proto). Each value is a
 * simple_value. */
#ifndef HAPT_REPORT_TENSORBOARD_H
#define HAPT_REPORT_TENSORBOARD_H

#include "append.h"
#include "hapt/train.h"

struct tensorboard {
    struct append file;
    int64_t written, validations; /* steps and validations */
};

/* Creates the file in FOLDER/tensorboard, for the steps after result->first_step. The session begins there: TensorBoard
 * then ignores later steps of earlier files. False: errno says why. */
bool tensorboard_open(struct tensorboard *events, const char *folder, const struct hapt_train_result *result,
                      double epoch_s);
/* Appends the steps and validations that are missing. False: errno says why. */
bool tensorboard_append(struct tensorboard *events, const struct hapt_train_result *result, double epoch_s);

#endif
