/*
 * Traces of one step of a plan for other simulators, from the instruction lists that are simulated and trained.
 *
 * A rank of the traces is a submesh: its devices advance together, as in hapt/simulate.h. Flow control is that of the
 * trainer: a receive is posted when a transfer slot is free, and a gradient waits for a slot to be sent from. Times are
 * the plan's, and NORM takes none, as in hapt_simulate.
 *
 * simgrid: time-independent traces of SMPI, platform, hosts, and a script that replays them. A flop is a nanosecond. A
 * link joins each pair of submeshes that exchange messages, full duplex, with the bandwidth that gives the plan's
 * transfer times. Replayed with links that serve messages in turn, the step takes the simulator's time.
 * chakra: execution traces of MLCommons Chakra: rank.N.et in its binary form, for ASTRA-sim and Chakra's tools, and
 * rank.N.json, the same nodes for reading.
 */
#ifndef HAPT_EMIT_H
#define HAPT_EMIT_H

#include "hapt/model.h"
#include "hapt/plan.h"

enum hapt_emit_format { HAPT_EMIT_SIMGRID, HAPT_EMIT_CHAKRA };
/* "simgrid", "chakra". */
bool hapt_emit_format_parse(const char *name, enum hapt_emit_format *format);
/* True for the name of a file that hapt_emit_write may write. */
bool hapt_emit_is_own(const char *name);
/* Bandwidth of all links where no profile gives the bytes of a message: a byte is a nanosecond. */
#define HAPT_EMIT_BANDWIDTH_BYTES_PER_S 1e9
/* Writes the traces to the folder, which it creates. `profile` gives the bytes of messages; NULL: the bytes that a link
 * of HAPT_EMIT_BANDWIDTH_BYTES_PER_S moves in the plan's times. Rank-local. HAPT_ERR_IO, HAPT_ERR_MEMORY;
 * HAPT_ERR_INPUT: the profile is not of this plan's layers; HAPT_ERR_USAGE: the plan is priced without overlap. */
enum hapt_status hapt_emit_write(const struct hapt_plan *plan, const struct hapt_profile *profile,
                                 enum hapt_emit_format format, const char *folder);

/*
 * What other trainers read of a plan. TRAINER.json: format "hapt-emitted-plan", version, trainer, microbatches,
 * microbatch_rows, settings by the trainer's names, and "cannot": sentences on what the trainer lacks.
 *
 * torchtitan: schedule.csv, the schedule for PyTorch's pipelining runtime (format compute_only: a row per rank, actions
 * such as 0F3, 0B3, or 0I3 and 0W3 of split backward passes), and module_fqns_per_model_part, the modules of each
 * stage. megatron: pipeline_model_parallel_layout, "Et*3|t*5L". deepspeed: layers, and parts, the first layer of each
 * stage.
 */
enum hapt_trainer { HAPT_TRAINER_TORCHTITAN, HAPT_TRAINER_MEGATRON, HAPT_TRAINER_DEEPSPEED };
bool hapt_trainer_parse(const char *name, enum hapt_trainer *trainer);
/* True for the name of a file that hapt_emit_trainer may write. */
bool hapt_trainer_is_own(const char *name);
/* HAPT_ERR_INPUT: the trainer cannot cut the model where stages begin, or cannot run such a pipeline. `plan`: made from
 * `model`, so that its stages have operators. Rank-local. */
enum hapt_status hapt_trainer_check(const struct hapt_plan *plan, const struct hapt_model *model,
                                    enum hapt_trainer trainer, struct hapt_arena *arena);
/* Writes the files of a plan that hapt_trainer_check accepts. *sentences gets those of "cannot", and a NULL.
 * Rank-local. HAPT_ERR_IO, HAPT_ERR_MEMORY. */
enum hapt_status hapt_emit_trainer(const struct hapt_plan *plan, const struct hapt_model *model,
                                   enum hapt_trainer trainer, const char *folder, struct hapt_arena *arena,
                                   const char ***sentences);

#endif
