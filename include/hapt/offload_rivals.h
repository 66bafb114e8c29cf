/*
 * Training on one device with the host's memory beside it, on paper: AutoHete ("AutoHete: an automatic and efficient
 * heterogeneous training system for LLMs") and the systems that it is compared with. hapt prices these plans for
 * comparison. It cannot run them.
 *
 * A model is L equal blocks. A choice (c, p, o) says what leaves the device. The first c blocks recompute their
 * activations (AutoHete, Insight 1). The last o blocks have their optimizer state on the host (Insight 2), with the
 * weights that the host updates. The first p of these blocks keep no weights on the device between their passes.
 * So weights are away only where the host has them, which is the paper's p <= o (footnote 2).
 *
 * Memory is equations (1) and (2). Time is either one step alone by equations (3) to (5), or the steady period of
 * successive steps on four streams: computing, copies to the device, copies to the host, and updates on the host.
 *
 * Not modelled: embeddings and loss in time, memory over time (equation (1) bounds its peak only), and the paper's
 * earlier fetches where memory allows.
 */
#ifndef HAPT_OFFLOAD_RIVALS_H
#define HAPT_OFFLOAD_RIVALS_H

#include "hapt/status.h"

/* Times and bytes are those of one block, if nothing else is said. Symbols in brackets are the paper's. */
struct hapt_offload_case {
    int block_count;                       /* (L) */
    double forward_s, backward_s;          /* (t_fp, t_bp) backward without recomputation */
    double fetch_s;                        /* (t_h2d) its weights to the device */
    double offload_s;                      /* (t_d2h) its gradients to the host */
    double device_update_s, host_update_s; /* (t_optim^gpu, t_optim^cpu) */
    double weight_bytes;                   /* (2 M_p) */
    double state_bytes;                    /* (12 M_p) optimizer state with fp32 weights */
    double activation_bytes;               /* (2 M_a) kept from forward to backward */
    double checkpoint_bytes;               /* (2 M_a') kept if the block recomputes; at most activation_bytes */
    double device_constant_bytes;          /* (M_gc) whole model, beside the blocks */
    double host_constant_bytes;            /* (M_cc) */
    double device_memory_bytes;            /* (M_gpu) of the device */
    double host_memory_bytes;              /* (M_cpu) of the host */
};

/* HAPT_ERR_INPUT: a time or size is negative or not finite, a checkpoint is larger than the activations, or
 * block_count is not in [1, 4096]. The functions below assume a case that passes, except where they check it. */
enum hapt_status hapt_offload_case_check(const struct hapt_offload_case *given);

struct hapt_offload_gpt {
    int layers, hidden, heads, vocabulary;
    int sequence, batch;  /* tokens per row, rows per step */
    bool fused_attention; /* attention keeps no scores (FlashAttention) */
};

struct hapt_offload_machine {
    double peak_flops;                   /* flop/s of the device in 16 bits */
    double efficiency;                   /* in (0, 1]: the share of it that blocks reach */
    double device_bandwidth_bytes_per_s; /* of the device's own memory */
    double link_bandwidth_bytes_per_s;   /* between host and device, in each direction at once */
    double host_update_parameters_per_s; /* Adam on the host */
    double device_memory_bytes, host_memory_bytes;
};

/*
 * The case of a GPT model in mixed precision with Adam; the formulas stand beside them in the source. The paper
 * measures times and sizes on one block. Here they are computed, with M_p = 12 hidden^2 (AutoHete Table 1 agrees).
 * HAPT_ERR_INPUT: a size or rate is not positive, or hapt_offload_case_check fails.
 */
enum hapt_status hapt_offload_case_gpt(const struct hapt_offload_gpt *gpt, const struct hapt_offload_machine *machine,
                                       struct hapt_offload_case *made);

/* 0 <= c <= L and 0 <= p <= o <= L; functions assert it. */
struct hapt_offload_choice {
    int recomputed;   /* (c) blocks [0, c) */
    int weights_away; /* (p) blocks [L - o, L - o + p) */
    int state_away;   /* (o) blocks [L - o, L) */
};

/* The left sides of AutoHete (1) and (2), in bytes: the peak on the device, and what the host holds. */
double hapt_offload_device_bytes(const struct hapt_offload_case *given, struct hapt_offload_choice choice);
double hapt_offload_host_bytes(const struct hapt_offload_case *given, struct hapt_offload_choice choice);
/* AutoHete (1) and (2) hold. */
bool hapt_offload_fits(const struct hapt_offload_case *given, struct hapt_offload_choice choice);

/* Seconds of the passes of one step alone, AutoHete (3) and (5). (5) uses (4), with v the number of blocks that both
 * recompute and have their weights away: min(c, p) if o = L. */
double hapt_offload_forward_s(const struct hapt_offload_case *given, struct hapt_offload_choice choice);
double hapt_offload_backward_s(const struct hapt_offload_case *given, struct hapt_offload_choice choice);

/* The optimum of AutoHete (6), by enumeration: the least sum of (3) and (5) that fits. Ties go to the least o, then the
 * least c, then the least p. HAPT_ERR_INFEASIBLE: nothing fits. */
enum hapt_status hapt_offload_optimum(const struct hapt_offload_case *given, struct hapt_offload_choice *choice);

/* Operations that may run at the same time. */
enum hapt_offload_overlap {
    HAPT_OFFLOAD_SYNCHRONOUS,  /* one operation at a time */
    HAPT_OFFLOAD_PHASES,       /* updates begin behind the last backward pass, the next step behind the last fetch */
    HAPT_OFFLOAD_WITHIN_STEP,  /* updates block by block; the next step, fetches included, begins behind the last one */
    HAPT_OFFLOAD_ACROSS_STEPS, /* only data dependences hold */
};

struct hapt_offload_execution {
    enum hapt_offload_overlap overlap;
    bool priority; /* the earliest block first in both copies and on the host (Insight 3); false: in order of passes.
                      HAPT_OFFLOAD_ACROSS_STEPS only (asserted) */
    bool clipping; /* gradients are clipped by their global norm: no update before the last backward pass */
};

/*
 * The steady period of a step in seconds: three steps on four streams, from the last forward pass of the second step
 * to that of the third one. All that belongs to a step, or prepares the next, happens between two such times, so each
 * period is as long as the others. The choice may exceed the memory.
 *
 * FORWARD of a block with its state on the host waits for a FETCH of its weights, which waits for HOST_UPDATE. So does
 * BACKWARD, or RECOMPUTE in front of it, where weights are away. This second FETCH begins one block early: when
 * BACKWARD two blocks later has ended (AutoHete 3.2.2). OFFLOAD follows BACKWARD, and HOST_UPDATE follows OFFLOAD. The
 * first FETCH of a step follows the last one of the step before, since memory is short until then. With clipping each
 * block's square sum is taken on the device, so the norm is known when the last BACKWARD ends; it takes no time.
 *
 * HAPT_ERR_MEMORY.
 */
enum hapt_status hapt_offload_period(const struct hapt_offload_case *given, struct hapt_offload_choice choice,
                                     struct hapt_offload_execution execution, double *period_s);

/* The choice of the least period that fits, instead of the optimum of one step alone. For each o it simulates the least
 * c of each p, up to the first p that needs no recomputation. This is exact in order, where more work never shortens
 * the period. Ties go to the least o, then the least p. HAPT_ERR_INFEASIBLE: nothing fits;
 * HAPT_ERR_MEMORY. */
enum hapt_status hapt_offload_jointly(const struct hapt_offload_case *given, struct hapt_offload_execution execution,
                                      struct hapt_offload_choice *choice, double *period_s);

/* The systems of AutoHete 4.1 and full recomputation. All but AutoHete recompute all blocks or none, and each takes the
 * best of its choices under its own execution. */
enum hapt_offload_rival {
    HAPT_RIVAL_RECOMPUTE_ALL, /* c = L, p = o = 0 */
    HAPT_RIVAL_ZERO_OFFLOAD,  /* p = 0, o = L; HAPT_OFFLOAD_PHASES */
    HAPT_RIVAL_PATRICKSTAR,   /* any p and o, by memory; HAPT_OFFLOAD_SYNCHRONOUS */
    HAPT_RIVAL_STRONGHOLD,    /* p = o: a window of blocks stays on the device; HAPT_OFFLOAD_WITHIN_STEP */
    HAPT_RIVAL_AUTOHETE,      /* hapt_offload_optimum; HAPT_OFFLOAD_ACROSS_STEPS with priority */
    HAPT_RIVAL_COUNT
};
const char *hapt_offload_rival_name(enum hapt_offload_rival rival);

struct hapt_offload_plan {
    struct hapt_offload_choice choice;
    struct hapt_offload_execution execution;
    double period_s;
};
/* HAPT_ERR_INFEASIBLE: none of its choices fits; HAPT_ERR_INPUT (hapt_offload_case_check); HAPT_ERR_MEMORY. */
enum hapt_status hapt_offload_rival_plan(const struct hapt_offload_case *given, enum hapt_offload_rival rival,
                                         bool clipping, struct hapt_offload_plan *plan);

#endif
