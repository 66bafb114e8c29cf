/* Steps and objects of the problem. Private to synthesis*.c. */
#ifndef HAPT_SYNTHESIS_SYNTHESIS_FOLD_H
#define HAPT_SYNTHESIS_SYNTHESIS_FOLD_H

#include "synthesis_private.h"

/* Fills the operators in folded order, and the objects with their lifetimes. */
enum hapt_status hapt_fold(struct problem *problem);

#endif
