/* Messages of a simulation: channels, credits and arrivals. simulate.c and place_weights.c play lists with them. */
#ifndef HAPT_SCHEDULE_PLAY_H
#define HAPT_SCHEDULE_PLAY_H

#include <stdlib.h>

#include "hapt/simulate.h"

struct message {
    double ready_s; /* when the sender handed it over */
    int edge, microbatch;
};

/* The messages from one submesh to another, in the order in which they were sent. */
struct channel {
    struct message *message;
    int count, next; /* handed over; the first that is not yet timed */
    double free_s;   /* end of the previous transfer */
};

struct play {
    const struct hapt_schedule *schedule;
    const struct hapt_costs *costs;
    int slots;                      /* transfer slots of an edge; 0: unlimited, also without overlap */
    int count;                      /* microbatches of all steps */
    double *edge_s;                 /* [edge] */
    int *arrived;                   /* [edge] microbatches whose arrival is timed */
    int *consumed;                  /* [edge] microbatches with which the receiver has computed */
    double *arrived_s, *consumed_s; /* [edge][count] */
    struct channel *channel;        /* [channel_count] */
};

/* Gives the next `bytes` of a block, or counts them if there is no block. */
static inline void *play_carve(char *block, size_t *used, size_t bytes)
{
    void *const address = block ? block + *used : NULL;
    *used += hapt_align(bytes);
    return address;
}

/* Places what starts as zero in the block; then, in play_place_rest, what need not. */
static inline void play_place(struct play *play, char *block, size_t *used)
{
    const size_t edges = (size_t)play->schedule->edges.count;
    play->arrived = play_carve(block, used, edges * sizeof *play->arrived);
    play->consumed = play_carve(block, used, edges * sizeof *play->consumed);
    play->channel = play_carve(block, used, (size_t)play->schedule->edges.channel_count * sizeof *play->channel);
}

static inline void play_place_rest(struct play *play, char *block, size_t *used)
{
    const struct hapt_schedule_edges *edges = &play->schedule->edges;
    const size_t count = (size_t)play->count;
    play->edge_s = play_carve(block, used, (size_t)edges->count * sizeof *play->edge_s);
    play->arrived_s = play_carve(block, used, (size_t)edges->count * count * sizeof *play->arrived_s);
    play->consumed_s = play_carve(block, used, (size_t)edges->count * count * sizeof *play->consumed_s);
    struct message *message = play_carve(block, used, (size_t)edges->count * count * sizeof *message);
    if (!block) return;
    for (int k = 0; k < edges->channel_count; k++) {
        play->channel[k].message = message;
        for (int e = 0; e < edges->count; e++)
            if (edges->channel_of[e] == k) message += count;
    }
}

static inline double play_edge_s(const struct hapt_schedule *schedule, const struct hapt_costs *costs, int e)
{
    const struct hapt_schedule_edge *edge = &schedule->edges.edge[e];
    if (costs->edge_s) return costs->edge_s[e];
    const int low = edge->from < edge->to ? edge->from : edge->to;
    return abs(edge->from - edge->to) == 1 ? costs->comm_s[low] : 0;
}

/* fmax without its NaN handling, which costs a library call. */
static inline double later(double a_s, double b_s)
{
    return a_s > b_s ? a_s : b_s;
}

/* The time of an update before the next step begins. */
static inline double play_update_s(const struct hapt_costs *costs, int chunk)
{
    return (costs->step_s ? costs->step_s[chunk] : 0) - (costs->deferred_s ? costs->deferred_s[chunk] : 0);
}

/* The end of the first forward pass of a chunk in a step, whose deferred update ends at update_s if nothing delays it.
 * Of the update, what is left when the pass starts is copied while it computes, and computed between its operators. */
static inline double play_first_forward_end(const struct hapt_costs *costs, int chunk, double start_s, double update_s)
{
    const double end_s = start_s + costs->forward_s[chunk];
    if (!costs->deferred_s || start_s >= update_s) return end_s;
    const double left = (update_s - start_s) / costs->deferred_s[chunk];
    return later(update_s + HAPT_DEFERRED_TAIL * costs->forward_s[chunk], end_s + left * costs->deferred_work_s[chunk]);
}

static inline size_t play_cell(const struct play *play, int edge, int microbatch)
{
    return (size_t)edge * (size_t)play->count + (size_t)microbatch;
}

/* When the transfer slot of a microbatch is free: it was computed with, and has been passed on. false: not yet known.
 */
static inline bool play_slot_free(const struct play *play, int e, int microbatch, double *start_s)
{
    const struct hapt_schedule_edges *edges = &play->schedule->edges;
    if (play->consumed[e] <= microbatch) return false;
    *start_s = later(*start_s, play->consumed_s[play_cell(play, e, microbatch)]);
    for (int k = edges->next_start ? edges->next_start[e] : 0; edges->next_start && k < edges->next_start[e + 1]; k++) {
        const int next = edges->next[k];
        if (play->arrived[next] <= microbatch) return false;
        *start_s = later(*start_s, play->arrived_s[play_cell(play, next, microbatch)]);
    }
    return true;
}

/* Times every transfer whose sender and transfer slot are known. A transfer that passes a message on frees slots of
 * other channels. */
static inline void play_advance(const struct play *play, struct channel *channel)
{
    const struct hapt_schedule_edges *edges = &play->schedule->edges;
    while (channel->next < channel->count) {
        const struct message *message = &channel->message[channel->next];
        const int e = message->edge, before = message->microbatch - play->slots;
        double start_s = later(message->ready_s, channel->free_s);
        if (play->slots > 0 && before >= 0 && !play_slot_free(play, e, before, &start_s)) break;
        channel->free_s = start_s + play->edge_s[e];
        play->arrived_s[play_cell(play, e, message->microbatch)] = channel->free_s;
        play->arrived[e]++;
        channel->next++;
        if (!edges->before_start) continue;
        for (int k = edges->before_start[e]; k < edges->before_start[e + 1]; k++) {
            struct channel *other = &play->channel[edges->channel_of[edges->before[k]]];
            if (other->next < other->count && other->message[other->next].edge == edges->before[k])
                play_advance(play, other); /* a chain of relays is as long as the pipeline at most */
        }
    }
}

/* The chunk has computed with a microbatch: transfers that wait for its slots start. */
static inline void play_consume(const struct play *play, int chunk, int direction, int microbatch, double clock_s)
{
    const struct hapt_schedule_edges *edges = &play->schedule->edges;
    const int at = direction * play->schedule->chunk_count + chunk;
    for (int k = edges->in_start[at]; k < edges->in_start[at + 1]; k++) {
        const int e = edges->in[k];
        if (edges->channel_of[e] < 0) continue;
        struct channel *channel = &play->channel[edges->channel_of[e]];
        play->consumed_s[play_cell(play, e, microbatch)] = clock_s;
        play->consumed[e]++;
        if (channel->next < channel->count && channel->message[channel->next].edge == e) play_advance(play, channel);
    }
}

/* When have all messages to the chunk arrived? Without overlap, sending blocks the receiver for as long from its
 * request on. false: not yet known. */
static inline bool play_receive(const struct play *play, int chunk, int direction, int microbatch, double *clock_s)
{
    const struct hapt_schedule_edges *edges = &play->schedule->edges;
    const int at = direction * play->schedule->chunk_count + chunk;
    double now_s = *clock_s;
    for (int k = edges->in_start[at]; k < edges->in_start[at + 1]; k++) {
        const int e = edges->in[k];
        if (edges->channel_of[e] < 0) continue;
        if (play->arrived[e] <= microbatch) return false;
        const double arrived_s = play->arrived_s[play_cell(play, e, microbatch)];
        if (play->costs->blocking)
            now_s = later(now_s, arrived_s - play->edge_s[e]) + play->edge_s[e];
        else
            now_s = later(now_s, arrived_s);
    }
    *clock_s = now_s;
    return true;
}

/* Hands the messages of the chunk over. Without overlap, sending blocks the sender. */
static inline void play_send(const struct play *play, int chunk, int direction, int microbatch, double *clock_s)
{
    const struct hapt_schedule_edges *edges = &play->schedule->edges;
    const int at = direction * play->schedule->chunk_count + chunk;
    for (int e = edges->out_start[at]; e < edges->out_start[at + 1]; e++) {
        if (edges->channel_of[e] < 0) continue;
        struct channel *channel = &play->channel[edges->channel_of[e]];
        channel->message[channel->count++] = (struct message){*clock_s, e, microbatch};
        if (play->costs->blocking) *clock_s = later(*clock_s, channel->free_s) + play->edge_s[e];
        if (channel->next == channel->count - 1) play_advance(play, channel);
    }
}

/* When have all messages of a microbatch left the chunk? false: not yet known. */
static inline bool play_sent(const struct play *play, int chunk, int direction, int microbatch, double *clock_s)
{
    const struct hapt_schedule_edges *edges = &play->schedule->edges;
    const int at = direction * play->schedule->chunk_count + chunk;
    double now_s = *clock_s;
    for (int e = edges->out_start[at]; e < edges->out_start[at + 1]; e++) {
        if (edges->channel_of[e] < 0) continue;
        if (play->arrived[e] <= microbatch) return false;
        now_s = later(now_s, play->arrived_s[play_cell(play, e, microbatch)]);
    }
    *clock_s = now_s;
    return true;
}

/* A gradient to be sent needs a transfer slot: the transfer `slots` microbatches before must have ended. */
static inline bool play_backward_start(const struct play *play, int chunk, int microbatch, double *start_s)
{
    const int before = microbatch - play->slots;
    return play->slots == 0 || before < 0 || play_sent(play, chunk, 1, before, start_s);
}

#endif
