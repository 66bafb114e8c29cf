/*
 * A stage on a modelled device (--device emulated): the runtime is the real one, but computing lasts as long as the
 * plan says, messages are a header and a few bytes paced to their modelled size, and of the weights there is a sample,
 * which goes through the optimizer with gradients by rule, so that a resumed run can be told from one that was never
 * stopped.
 *
 * What its ranks exchange among themselves is part of the time that the plan gives to computing, and moves nothing.
 */
#ifndef HAPT_TRAIN_EMULATE_H
#define HAPT_TRAIN_EMULATE_H

#include "stage.h"

/* Elements of a parameter that stand for it, at most. */
#define EMULATED_SAMPLE 64

/* --device emulated. */
bool emulation_asked(const struct hapt_config *config);
/* Is the cluster's work modelled, and how long does a modelled second last? The same on all ranks. */
bool emulation_of(const struct hapt_cluster *cluster, const struct hapt_config *config, double *time_scale);

/* The times of this rank's stage and the sample of its parameters. After the stage's engine; rank-local. */
enum hapt_status emulation_create(struct stage *stage, int state_count);

/* Instead of hapt_courier_add: one message a peer, as long as `options` say for the link's pace. `paced`: else its time
 * counts elsewhere. */
enum hapt_status emulation_add_flow(struct stage *stage, const struct hapt_flow_options *options, bool paced,
                                    int *flow);
/* Instead of hapt_courier_send, ..._wait_sent, ..._wait_received and ..._free: messages say what they are, and the
 * device's time goes on with them: it is free from the time on at which what it waited for was due. A message that is
 * not what it should be: HAPT_ERR_INTERNAL names both. */
void emulation_send(struct stage *stage, int flow, int slot);
enum hapt_status emulation_wait_sent(struct stage *stage, int flow, int slot);
enum hapt_status emulation_wait_received(struct stage *stage, int flow, int64_t sequence);
void emulation_free(struct stage *stage, int flow);
/* The ranks of the stage are all here: what the sum of its gradients waits for. Collective over the stage. */
enum hapt_status emulation_meet(const struct stage *stage);
/* One step of the optimizer for the sample. */
enum hapt_status emulation_update(struct stage *stage, const struct hapt_update *update);

/* How many elements of a parameter are kept in checkpoints, and their first values. */
int64_t emulation_sample(const struct hapt_tensor *parameter);
void emulation_initial(const struct stage *stage, const struct hapt_tensor *parameter, float *value);
void emulation_set(struct stage *stage, int parameter, int state, const float *value);
void emulation_get(const struct stage *stage, int parameter, int state, float *value);

#endif
