/* All transitions from a state by one step. Private to synthesis*.c. */
#ifndef HAPT_SYNTHESIS_SYNTHESIS_TRANSITIONS_H
#define HAPT_SYNTHESIS_SYNTHESIS_TRANSITIONS_H

#include "synthesis_private.h"

/* The result of a step on a state, besides the objects' words. */
struct advance {
    const struct problem *problem;
    const struct step *step;
    const struct choice *choice;
    uint32_t *word; /* [object] words after the step */
    struct decision decision;
    double moved_s, after_s; /* communications before and after the operator */
    bool synchronises, synchronises_after;
    int output_layout[HAPT_MAX_OUTPUTS]; /* layouts of outputs after it */
    double later_s;                      /* ends of parameter gradients, and memory at its price */
    double memory[MOST_CLASSES];         /* bytes charged */
    void (*found)(struct advance *advance, void *context);
    void *context;
};
/* Calls found() for every choice and every set of communications; restores `word`. */
void hapt_advance_all(struct advance *advance);

#endif
