/* All ways to go on from a state by one step. Private to synthesis*.c. */
#ifndef HAPT_SPMD_SYNTHESIS_MOVES_H
#define HAPT_SPMD_SYNTHESIS_MOVES_H

#include "synthesis_private.h"

/* What a step makes of a state, besides the words on objects. */
struct advance {
    const struct problem *problem;
    const struct step *step;
    const struct choice *choice;
    uint32_t *word; /* [object] words behind the step */
    struct decision decision;
    double moved_s, after_s; /* communications in front of the operator and behind it */
    bool synchronises, synchronises_after;
    int landed[HAPT_MAX_OUTPUTS]; /* layouts of outputs behind it */
    double later_s;               /* gradients of parameters that are done, and memory by its price */
    double memory[MOST_CLASSES];  /* bytes that are settled */
    void (*found)(struct advance *advance, void *context);
    void *context;
};
/* Calls found() for every choice and every set of communications; `word` is as before afterwards. */
void hapt_advance_all(struct advance *advance);

#endif
