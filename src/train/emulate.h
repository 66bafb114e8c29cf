/*
 * A stage on a modelled device (--device emulated), with the real runtime. Computation lasts as long as the plan says.
 * Messages are a header and a few bytes, throttled to their modelled size. The weights are replaced by a sample, which
 * the optimizer updates with gradients from a rule. So a resumed run can be compared with an uninterrupted one.
 *
 * Communication inside the stage is part of its planned computation time and sends nothing.
 */
#ifndef HAPT_TRAIN_EMULATE_H
#define HAPT_TRAIN_EMULATE_H

#include "stage.h"

/* elements per parameter in the sample, at most */
#define EMULATED_SAMPLE 64

/* True for --device emulated. */
bool emulation_asked(const struct hapt_config *config);
/* True if the cluster is emulated; *time_scale: real seconds per modelled second. The same on all ranks. */
bool emulation_of(const struct hapt_cluster *cluster, const struct hapt_config *config, double *time_scale);

/* Sets up the times of this rank's stage and the sample of its parameters. Call after the stage's engine exists;
 * rank-local. */
enum hapt_status emulation_create(struct stage *stage, int state_count);

/* Replaces hapt_comm_thread_add: one message per peer, throttled to the link in `options`. `paced` false: not
 * throttled, its time counts elsewhere. */
enum hapt_status emulation_add_flow(struct stage *stage, const struct hapt_flow_options *options, bool paced,
                                    int *flow);
/* Replace hapt_comm_thread_send, ..._wait_sent, ..._wait_received and ..._free. Messages carry a description of
 * themselves, which is checked. They advance the device's modelled time: it is free from the time at which the awaited
 * event was due. HAPT_ERR_INTERNAL names the expected and the received message. */
void emulation_send(struct stage *stage, int flow, int slot);
enum hapt_status emulation_wait_sent(struct stage *stage, int flow, int slot);
enum hapt_status emulation_wait_received(struct stage *stage, int flow, int64_t sequence);
void emulation_free(struct stage *stage, int flow);
/* Waits for all ranks of the stage, as the sum of its gradients does. Collective over the stage. */
enum hapt_status emulation_barrier(const struct stage *stage);
/* Does one optimizer step on the sample. */
enum hapt_status emulation_update(struct stage *stage, const struct hapt_update *update);

/* Number of elements of a parameter kept in checkpoints, and their initial values. */
int64_t emulation_sample(const struct hapt_tensor *parameter);
void emulation_initial(const struct stage *stage, const struct hapt_tensor *parameter, float *value);
void emulation_set(struct stage *stage, int parameter, int state, const float *value);
void emulation_get(const struct stage *stage, int parameter, int state, float *value);

#endif
