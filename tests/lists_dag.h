/* Times of instruction lists by a DAG whose edges are written out: an oracle for the check and the simulator. */
#ifndef HAPT_LISTS_DAG_H
#define HAPT_LISTS_DAG_H

#include "random_lists.h"

/* A transfer of one microbatch over an edge between submeshes. */
struct transfer {
    int edge, microbatch; /* edge: of made->edge */
    int submesh, send;    /* the instruction that hands it over */
    int before;           /* the transfer before it on the channel, -1: none */
    double end_s;         /* -1 until the end times of its predecessors are known */
};

struct dag {
    const struct made *made;
    double end[MOST_SUBMESHES][MOST_INSTRUCTIONS];
    int at[3][MOST_CHUNKS][MOST_MICROBATCHES]; /* instruction of FORWARD, BACKWARD */
    int transfer_of[MOST_EDGES][MOST_MICROBATCHES];
    int transfers;
    struct transfer transfer[MOST_EDGES * MOST_MICROBATCHES];
};

/* The cost of an edge, which schedule.edges lists in another order. */
static double edge_cost(const struct made *made, int edge)
{
    const struct hapt_schedule_edges *edges = &made->schedule.edges;
    for (int e = 0; e < edges->count; e++)
        if (edges->edge[e].from == made->edge[edge].from && edges->edge[e].to == made->edge[edge].to)
            return made->edge_s[e];
    return NAN;
}

/* Transfers in the order of the sends: those of one instruction to nearer chunks of the graph first. */
static void list_transfers(struct dag *dag)
{
    const struct made *made = dag->made;
    dag->transfers = 0;
    for (int s = 0; s < made->schedule.submesh_count; s++) {
        int last[MOST_LINKS + MOST_SUBMESHES];
        for (int k = 0; k < MOST_LINKS + MOST_SUBMESHES; k++) last[k] = -1;
        for (int i = 0; i < made->list[s].count; i++) {
            const struct hapt_instruction *at = &made->instruction[s][i];
            if (at->kind == HAPT_INSTRUCTION_FORWARD) dag->at[0][at->chunk][at->microbatch] = i;
            if (at->kind == HAPT_INSTRUCTION_BACKWARD) dag->at[1][at->chunk][at->microbatch] = i;
            const bool backward = at->kind == HAPT_INSTRUCTION_SEND_BACKWARD;
            if (at->kind != HAPT_INSTRUCTION_SEND_FORWARD && !backward) continue;
            for (int to = 0; to < made->schedule.chunk_count; to++)
                for (int e = 0; e < made->edge_count; e++) {
                    const struct hapt_schedule_edge *edge = &made->edge[e];
                    if (edge->from != at->chunk || edge->to != to || edge->backward != backward) continue;
                    if (is_local(made, edge)) continue;
                    int *before = &last[edge->link > 0 ? edge->link : MOST_LINKS + made->submesh_of[to]];
                    dag->transfer[dag->transfers] = (struct transfer){e, at->microbatch, s, i, *before, -1};
                    dag->transfer_of[e][at->microbatch] = *before = dag->transfers++;
                }
        }
    }
}

static bool wait_for(double *start_s, double end_s)
{
    if (end_s < 0) return false;
    *start_s = fmax(*start_s, end_s);
    return true;
}

/* The message of edge `in` has been sent over all edges that a relay names. */
static bool wait_for_relays(const struct dag *dag, const struct hapt_schedule_edge *in, int microbatch, double *start_s)
{
    const struct made *made = dag->made;
    for (int k = 0; k < made->relay_count; k++) {
        const struct hapt_schedule_relay *relay = &made->relay[k];
        if (relay->from != in->from || relay->via != in->to) continue;
        for (int e = 0; e < made->edge_count; e++) {
            const struct hapt_schedule_edge *out = &made->edge[e];
            if (out->backward || out->from != relay->via || out->to != relay->to || is_local(made, out)) continue;
            if (!wait_for(start_s, dag->transfer[dag->transfer_of[e][microbatch]].end_s)) return false;
        }
    }
    return true;
}

/* It is handed over, the transfer before is over, and the receiver has a free transfer slot. */
static bool time_transfer(struct dag *dag, struct transfer *transfer)
{
    const struct made *made = dag->made;
    const struct hapt_schedule_edge *edge = &made->edge[transfer->edge];
    const int freed = transfer->microbatch - hapt_schedule_transfer_slots(&made->schedule);
    double start_s = 0;
    if (!wait_for(&start_s, dag->end[transfer->submesh][transfer->send])) return false;
    if (transfer->before >= 0 && !wait_for(&start_s, dag->transfer[transfer->before].end_s)) return false;
    if (freed >= 0 &&
        !wait_for(&start_s, dag->end[made->submesh_of[edge->to]][dag->at[edge->backward][edge->to][freed]]))
        return false;
    if (freed >= 0 && !edge->backward && !wait_for_relays(dag, edge, freed, &start_s)) return false;
    transfer->end_s = start_s + edge_cost(made, transfer->edge);
    return true;
}

/* All transfers of a microbatch over the chunk's edges in a direction, in or out, are over. */
static bool wait_for_edges(const struct dag *dag, int chunk, bool backward, bool in, int microbatch, double *start_s)
{
    const struct made *made = dag->made;
    for (int e = 0; e < made->edge_count; e++) {
        const struct hapt_schedule_edge *edge = &made->edge[e];
        if (edge->backward != backward || (in ? edge->to : edge->from) != chunk || is_local(made, edge)) continue;
        if (!wait_for(start_s, dag->transfer[dag->transfer_of[e][microbatch]].end_s)) return false;
    }
    return true;
}

/* The messages of the microbatch that used the slot before have left it. */
static bool wait_for_slot(const struct dag *dag, int submesh, int index, double *start_s)
{
    const struct hapt_instruction *list = dag->made->instruction[submesh];
    for (int i = index - 1; i >= 0; i--)
        if (list[i].kind == HAPT_INSTRUCTION_FORWARD && list[i].slot == list[index].slot)
            return wait_for_edges(dag, list[i].chunk, false, false, list[i].microbatch, start_s);
    return true;
}

static bool time_instruction(struct dag *dag, int submesh, int index)
{
    const struct made *made = dag->made;
    const struct hapt_instruction *at = &made->instruction[submesh][index];
    const int c = at->chunk, m = at->microbatch;
    double start_s = 0, lasts_s = 0;
    if (index > 0 && !wait_for(&start_s, dag->end[submesh][index - 1])) return false;
    if (at->kind == HAPT_INSTRUCTION_RECEIVE_FORWARD && !wait_for_edges(dag, c, false, true, m, &start_s)) return false;
    if (at->kind == HAPT_INSTRUCTION_RECEIVE_BACKWARD && !wait_for_edges(dag, c, true, true, m, &start_s)) return false;
    if (at->kind == HAPT_INSTRUCTION_FORWARD) {
        lasts_s = made->forward_s[c];
        if (!wait_for_slot(dag, submesh, index, &start_s)) return false;
    }
    if (at->kind == HAPT_INSTRUCTION_BACKWARD) {
        lasts_s = made->backward_s[c];
        if (m >= hapt_schedule_transfer_slots(&made->schedule) &&
            !wait_for_edges(dag, c, true, false, m - hapt_schedule_transfer_slots(&made->schedule), &start_s))
            return false;
    }
    if (at->kind == HAPT_INSTRUCTION_WEIGHT) lasts_s = made->weight_s[c];
    if (at->kind == HAPT_INSTRUCTION_UPDATE) lasts_s = made->step_s[c] / made->schedule.update_groups;
    dag->end[submesh][index] = start_s + lasts_s;
    return true;
}

/* Computes all end times that can be known, in any order. false: a cycle remains. */
static bool time_all(struct dag *dag)
{
    const struct hapt_schedule *schedule = &dag->made->schedule;
    bool moved = true, all = false;
    list_transfers(dag);
    for (int s = 0; s < MOST_SUBMESHES; s++)
        for (int i = 0; i < dag->made->list[s].count; i++) dag->end[s][i] = -1;
    while (moved) {
        moved = false;
        all = true;
        for (int s = schedule->submesh_count - 1; s >= 0; s--)
            for (int i = 0; i < dag->made->list[s].count; i++) {
                if (dag->end[s][i] >= 0) continue;
                all = false;
                if (!time_instruction(dag, s, i)) break; /* those behind it wait too */
                moved = true;
            }
        for (int t = 0; t < dag->transfers; t++)
            if (dag->transfer[t].end_s < 0 && time_transfer(dag, &dag->transfer[t])) moved = true;
    }
    return all;
}

#endif
