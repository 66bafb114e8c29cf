/* NeXus attributes of the run file. */
#ifndef HAPT_REPORT_NEXUS_H
#define HAPT_REPORT_NEXUS_H

#include "hapt/train.h"

/* Marks the root and /train, and adds /train/curves: second names of the curves, of which viewers show the loss by step
 * first (modelled devices: the time of a step). Without steps there are no curves. Call after hapt_train_write. */
enum hapt_status nexus_write(struct hapt_h5 *file, const struct hapt_train_result *result);

#endif
