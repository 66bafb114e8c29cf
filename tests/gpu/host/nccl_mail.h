/*
 * Host CUDA, private part of its NCCL: messages between the ranks of a communicator, as files in a folder of /dev/shm.
 *
 * A message is written under a temporary name and linked to the names that its receivers read. So it is complete when
 * they see it, and exists once for all receivers. A receiver unlinks its name. Sending never waits. The last rank to
 * leave removes the folder.
 */
#ifndef HOST_CUDA_NCCL_MAIL_H
#define HOST_CUDA_NCCL_MAIL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define MAIL_MOST_RANKS 64

/* Messages of one channel between two ranks arrive in order. Channels are independent. */
enum mail_channel { MAIL_COLLECTIVE, MAIL_PAIR, MAIL_CHANNELS };

struct mail_box {
    char folder[200];
    int rank, ranks;
    pid_t process;          /* a forked child does not own the mailbox */
    volatile bool given_up; /* waits end at once */
    uint64_t written;       /* counts messages, for their names */
    uint64_t sent[MAIL_CHANNELS][MAIL_MOST_RANKS], received[MAIL_CHANNELS][MAIL_MOST_RANKS];
};

/* Waits until all `ranks` have arrived; false: the time is up, or the folder cannot be made. */
bool mail_open(struct mail_box *box, const char *folder, int rank, int ranks);
void mail_leave(struct mail_box *box);
/* Waits without limit until all have left. */
void mail_wait_for_all(const struct mail_box *box);
/* Sends a header and a body to each rank of [first, end). */
bool mail_send(struct mail_box *box, enum mail_channel channel, int first, int end, const void *header,
               size_t header_bytes, const void *body, size_t body_bytes);
/* Receives message number `sequence` of the channel from `source`: malloc memory, or NULL after the time-out. */
void *mail_receive(struct mail_box *box, enum mail_channel channel, int source, uint64_t sequence, size_t *bytes);

#endif
