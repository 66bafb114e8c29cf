/*
 * Host CUDA, private part of its NCCL: messages between the ranks of a communicator, as files in a folder of /dev/shm.
 *
 * A message is written under a name of its own and linked to the names where its receivers look, so it is whole when
 * they see it and stands once however many receive it; the receiver unlinks it. Sending never waits. The last rank to
 * leave removes the folder.
 */
#ifndef HOST_CUDA_NCCL_MAIL_H
#define HOST_CUDA_NCCL_MAIL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define MAIL_MOST_RANKS 64

/* Messages of one channel between two ranks arrive in order; channels do not wait for each other. */
enum mail_channel { MAIL_COLLECTIVE, MAIL_PAIR, MAIL_CHANNELS };

struct mail_box {
    char folder[200];
    int rank, ranks;
    pid_t process;          /* a forked child owns no mail box */
    volatile bool given_up; /* waits end at once */
    uint64_t written;       /* messages, for their names */
    uint64_t sent[MAIL_CHANNELS][MAIL_MOST_RANKS], received[MAIL_CHANNELS][MAIL_MOST_RANKS];
};

/* Waits for all `ranks` to come; false: time is up, or no such folder can be made. */
bool mail_open(struct mail_box *box, const char *folder, int rank, int ranks);
void mail_leave(struct mail_box *box);
/* For ever, where one does not leave. */
void mail_wait_for_all(const struct mail_box *box);
/* To each rank of [first, end): a header and a body. */
bool mail_send(struct mail_box *box, enum mail_channel channel, int first, int end, const void *header,
               size_t header_bytes, const void *body, size_t body_bytes);
/* Message number `sequence` of that channel from `source`; malloc memory, or NULL after the time-out. */
void *mail_receive(struct mail_box *box, enum mail_channel channel, int source, uint64_t sequence, size_t *bytes);

#endif
