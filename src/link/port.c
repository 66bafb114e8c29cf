/* Ports: the paced links of a rank, each in one direction. Messages of all flows over a port take turns, in the order
 * in which they were handed over. The simulator's channels (hapt/schedule.h) have the same order. */
#include "comm_thread.h"

enum hapt_status port_open(struct hapt_comm_thread *comm_thread, int number, struct port **port)
{
    for (int f = 0; f < comm_thread->flow_count && number > 0; f++) {
        *port = comm_thread->flow[f]->port;
        if (*port && (*port)->number == number) return HAPT_OK;
    }
    HAPT_NEW(*port, &comm_thread->arena, 1);
    (*port)->number = number;
    return HAPT_OK;
}

int64_t port_hand_over(struct port *port)
{
    return port ? port->handed_over++ : 0;
}

bool port_is_turn(const struct port *port, int64_t turn)
{
    return !port || port->turn == turn;
}

void port_end_turn(struct port *port)
{
    if (port) port->turn++;
}
