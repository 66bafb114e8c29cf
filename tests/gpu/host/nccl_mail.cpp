#include "nccl_mail.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define PATH_BYTES 300

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* HAPT_HOST_NCCL_TIMEOUT_S, default one minute. */
static double deadline(void)
{
    const char *text = getenv("HAPT_HOST_NCCL_TIMEOUT_S");
    const double seconds = text ? atof(text) : 0;
    return now_s() + (seconds > 0 ? seconds : 60);
}

/* Pauses with growing length; false: the time is up. */
static bool pause_until(double deadline_s, int *looks)
{
    const int look = (*looks)++;
    if (look < 50) {
        sched_yield();
        return true;
    }
    const struct timespec pause = {0, look < 500 ? 50000 : 500000};
    nanosleep(&pause, NULL);
    return now_s() < deadline_s;
}

static bool touch(const struct mail_box *box, const char *word)
{
    char path[PATH_BYTES];
    snprintf(path, sizeof path, "%s/%s.%d", box->folder, word, box->rank);
    const int file = open(path, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
    if (file >= 0) close(file);
    return file >= 0;
}

static int count(const struct mail_box *box, const char *word)
{
    char path[PATH_BYTES];
    int found = 0;
    for (int rank = 0; rank < box->ranks; rank++) {
        snprintf(path, sizeof path, "%s/%s.%d", box->folder, word, rank);
        found += access(path, F_OK) == 0;
    }
    return found;
}

/* Several ranks may do this at once. Files that are already gone are no error. */
static void remove_folder(const char *folder)
{
    char path[PATH_BYTES + 256];
    DIR *list = opendir(folder);
    for (struct dirent *entry; list && (entry = readdir(list));) {
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        if (entry->d_name[0] != '.') unlink(path);
    }
    if (list) closedir(list);
    rmdir(folder);
}

bool mail_open(struct mail_box *box, const char *folder, int rank, int ranks)
{
    memset(box, 0, sizeof *box);
    snprintf(box->folder, sizeof box->folder, "%s", folder);
    box->rank = rank;
    box->ranks = ranks;
    box->process = getpid();
    if ((mkdir(folder, 0700) && errno != EEXIST) || !touch(box, "here")) return false;
    const double until = deadline();
    for (int looks = 0; count(box, "here") < ranks;)
        if (!pause_until(until, &looks)) {
            char path[PATH_BYTES];
            snprintf(path, sizeof path, "%s/here.%d", folder, rank);
            unlink(path);
            rmdir(folder);
            return false;
        }
    return true;
}

void mail_leave(struct mail_box *box)
{
    if (box->process != getpid()) return;
    box->process = 0;
    if (touch(box, "gone") && count(box, "gone") == box->ranks) remove_folder(box->folder);
}

void mail_wait_for_all(const struct mail_box *box)
{
    for (int looks = 0; access(box->folder, F_OK) == 0 && count(box, "gone") < box->ranks;) pause_until(0, &looks);
}

static bool write_all(int file, const void *bytes, size_t count)
{
    const char *next = (const char *)bytes;
    while (count) {
        const ssize_t done = write(file, next, count);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return false;
        next += done;
        count -= (size_t)done;
    }
    return true;
}

bool mail_send(struct mail_box *box, enum mail_channel channel, int first, int end, const void *header,
               size_t header_bytes, const void *body, size_t body_bytes)
{
    char own[PATH_BYTES], path[PATH_BYTES];
    snprintf(own, sizeof own, "%s/draft.%d.%d.%llu", box->folder, box->rank, (int)channel,
             (unsigned long long)__sync_fetch_and_add(&box->written, 1));
    const int file = open(own, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
    if (file < 0) return false;
    bool fine = write_all(file, header, header_bytes) && write_all(file, body, body_bytes);
    fine = close(file) == 0 && fine;
    for (int peer = first; fine && peer < end; peer++) {
        snprintf(path, sizeof path, "%s/to.%d.%d.%d.%llu", box->folder, peer, box->rank, (int)channel,
                 (unsigned long long)box->sent[channel][peer]++);
        fine = link(own, path) == 0;
    }
    unlink(own);
    return fine;
}

void *mail_receive(struct mail_box *box, enum mail_channel channel, int source, uint64_t sequence, size_t *bytes)
{
    char path[PATH_BYTES];
    snprintf(path, sizeof path, "%s/to.%d.%d.%d.%llu", box->folder, box->rank, source, (int)channel,
             (unsigned long long)sequence);
    const double until = deadline();
    int file, looks = 0;
    while ((file = open(path, O_RDONLY | O_CLOEXEC)) < 0)
        if (box->given_up || errno != ENOENT || !pause_until(until, &looks)) return NULL;
    struct stat status;
    char *message = NULL;
    if (fstat(file, &status) == 0 && (message = (char *)malloc((size_t)status.st_size + 1))) {
        size_t done = 0;
        for (ssize_t more = 1; more > 0 && done<(size_t)status.st_size; done += more> 0 ? (size_t)more : 0)
            more = read(file, message + done, (size_t)status.st_size - done);
        *bytes = done;
    }
    close(file);
    unlink(path);
    return message;
}
