/* Folders with symbolic links, the lock of a folder, and which checkpoints are kept. */
#include "test.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../src/train/checkpoint.h"
#include "hapt/folder.h"
#include "hapt/lock.h"

static char root[] = "/tmp/hapt-folder-XXXXXX";

static const char *at(const char *name)
{
    static char path[8][256];
    static int next;
    next = (next + 1) % 8;
    snprintf(path[next], sizeof path[next], "%s/%s", root, name);
    return path[next];
}

static bool there(const char *name)
{
    struct stat about;
    return lstat(at(name), &about) == 0;
}

static void put(const char *name, const char *text)
{
    FILE *file = fopen(at(name), "w");
    CHECK(file && fputs(text, file) >= 0 && fclose(file) == 0);
}

static bool any_name(const char *name)
{
    return name[0] != '\0';
}

static bool no_letter(const char *name)
{
    return strncmp(name, "letter", 6) != 0;
}

static void making(void)
{
    CHECK_OK(hapt_folder_make(at("a/b//c/")));
    CHECK(hapt_folder_is(at("a/b/c")));
    CHECK_OK(hapt_folder_make(at("a/b/c")));
    put("file", "x");
    CHECK_FAILS(hapt_folder_make(at("file/d")), HAPT_ERR_IO);
    CHECK_FAILS(hapt_folder_make(at("file")), HAPT_ERR_IO);
    CHECK_OK(hapt_folder_try(at("a/b")));
    CHECK_FAILS(hapt_folder_try(at("nowhere")), HAPT_ERR_IO);
}

/* Neither a link in place of the folder nor links among its files cause removals elsewhere. */
static void removing(void)
{
    CHECK_OK(hapt_folder_make(at("outside")));
    put("outside/precious", "x");
    CHECK(symlink(at("outside"), at("link")) == 0);
    CHECK(hapt_folder_remove(root, "link", any_name));
    CHECK(!there("link") && there("outside/precious"));
    CHECK_OK(hapt_folder_make(at("mine/inner")));
    put("mine/data", "x");
    put("mine/letter", "x");
    CHECK(symlink(at("outside/precious"), at("mine/link")) == 0);
    CHECK(symlink(at("outside"), at("mine/folder-link")) == 0);
    CHECK(!hapt_folder_remove(root, "mine", no_letter)); /* a file and a folder that hapt did not make */
    CHECK(there("mine/letter") && there("mine/inner") && !there("mine/data") && !there("mine/link") &&
          !there("mine/folder-link"));
    CHECK(there("outside/precious"));
    rmdir(at("mine/inner"));
    CHECK(hapt_folder_remove(root, "mine", any_name) && !there("mine"));
    CHECK(hapt_folder_remove(root, "mine", any_name)); /* does not exist */
    put("plain", "x");
    CHECK(!hapt_folder_remove(root, "plain", any_name) && there("plain"));
}

static void setting_aside(void)
{
    char now[64];
    for (int i = 1; i <= 3; i++) {
        CHECK_OK(hapt_folder_make(at("step")));
        CHECK(hapt_folder_rename_with_suffix(root, "step", "damaged", now, sizeof now));
        CHECK(!strcmp(now, i == 1 ? "step.damaged" : i == 2 ? "step.damaged-2" : "step.damaged-3"));
        CHECK(there(now) && !there("step"));
    }
    CHECK(!hapt_folder_rename_with_suffix(root, "absent", "damaged", now, sizeof now) && !now[0]);
}

static bool count_entry(void *context, const char *name)
{
    (void)name;
    ++*(int *)context;
    return true;
}

static void listing(void)
{
    int count = 0;
    CHECK_OK(hapt_folder_make(at("list")));
    put("list/a", "");
    put("list/b", "");
    CHECK_OK(hapt_folder_list(at("list"), count_entry, &count));
    CHECK(count == 2);
    CHECK_OK(hapt_folder_list(at("absent"), count_entry, &count));
    CHECK(count == 2);
    CHECK(symlink(at("list"), at("list-link")) == 0);
    CHECK_FAILS(hapt_folder_list(at("list-link"), count_entry, &count), HAPT_ERR_IO);
    CHECK_FAILS(hapt_folder_list(at("list/a"), count_entry, &count), HAPT_ERR_IO);
}

/* The lock as another process sees it. The exit code is what hapt_lock_take returns there. */
static int take_elsewhere(const char *folder, char *message, size_t size)
{
    int pipes[2], status;
    CHECK(pipe(pipes) == 0);
    const pid_t process = fork();
    if (process == 0) {
        const enum hapt_status taken = hapt_lock_take(folder);
        const char *said = hapt_fail_message();
        if (write(pipes[1], said, strlen(said) + 1) < 0) _exit(99);
        _exit((int)taken); /* exits without releasing the lock */
    }
    close(pipes[1]);
    const ssize_t bytes = read(pipes[0], message, size - 1);
    message[bytes > 0 ? bytes : 0] = '\0';
    close(pipes[0]);
    waitpid(process, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void locking(void)
{
    char message[512], owner[256], number[32];
    const char *folder = at("locked");
    CHECK_OK(hapt_folder_make(folder));
    CHECK(hapt_lock_look(folder, owner, sizeof owner) == HAPT_LOCK_FREE && !owner[0]);
    /* The lock of a dead process is taken over at once. */
    CHECK(take_elsewhere(folder, message, sizeof message) == 0);
    CHECK(hapt_lock_look(folder, owner, sizeof owner) == HAPT_LOCK_STALE);
    CHECK(take_elsewhere(folder, message, sizeof message) == 0);
    /* No process gets the lock of a living process, and the message names the owner. */
    int ready[2];
    char byte;
    CHECK(pipe(ready) == 0);
    const pid_t holder = fork();
    if (holder == 0) {
        if (hapt_lock_take(folder) != HAPT_OK || write(ready[1], "x", 1) != 1) _exit(1);
        for (;;) pause();
    }
    CHECK(read(ready[0], &byte, 1) == 1);
    CHECK(hapt_lock_look(folder, owner, sizeof owner) == HAPT_LOCK_HELD);
    CHECK(hapt_lock_take(folder) == HAPT_ERR_USAGE);
    snprintf(number, sizeof number, "process %ld on host", (long)holder);
    CHECK_MESSAGE(strstr(hapt_fail_message(), number), "%s", hapt_fail_message());
    hapt_fail_reset();
    kill(holder, SIGKILL);
    waitpid(holder, NULL, 0);
    CHECK_OK(hapt_lock_take(folder));
    CHECK(hapt_lock_visible(folder, hapt_lock_token()) && strlen(hapt_lock_token()) == HAPT_LOCK_TOKEN_CHARS);
    CHECK_OK(hapt_lock_check());
    hapt_lock_release();
    CHECK(hapt_lock_look(folder, owner, sizeof owner) == HAPT_LOCK_FREE && !there("locked/.hapt-lock"));
    CHECK_OK(hapt_lock_check()); /* not locked */
    /* The file contains another job's text: this process has lost the lock, and does not change the file. */
    CHECK_OK(hapt_lock_take(folder));
    put("locked/.hapt-lock",
        "hapt-lock 1\nhost elsewhere\nprocess 7\nstarted 1\nboot b\nspace s\njob -\nsince now\ntoken other\n");
    CHECK_FAILS(hapt_lock_check(), HAPT_ERR_IO);
    hapt_lock_release();
    CHECK(there("locked/.hapt-lock"));
    /* A fresh lock of another host is valid. A lock that was last changed long ago is not. */
    CHECK(hapt_lock_look(folder, owner, sizeof owner) == HAPT_LOCK_HELD && strstr(owner, "elsewhere"));
    const struct timespec old[2] = {{1000000000, 0}, {1000000000, 0}};
    CHECK(utimensat(AT_FDCWD, at("locked/.hapt-lock"), old, 0) == 0);
    CHECK(hapt_lock_look(folder, owner, sizeof owner) == HAPT_LOCK_STALE);
    CHECK(take_elsewhere(folder, message, sizeof message) == 0);
    /* A link is not followed. */
    CHECK(unlink(at("locked/.hapt-lock")) == 0 && symlink(at("outside/precious"), at("locked/.hapt-lock")) == 0);
    CHECK(take_elsewhere(folder, message, sizeof message) == HAPT_ERR_IO);
    struct stat about;
    CHECK(stat(at("outside/precious"), &about) == 0 && about.st_size == 1);
}

/* A model of the rule on sets: checkpoints to keep must stay, and all others must be removed. */
static void choosing(void)
{
    uint64_t seed = 19;
    for (int round = 0; round < 2000; round++) {
        int64_t step[40], at_step = 0;
        bool stays[40];
        double loss[600];
        const int count = 1 + (int)(hapt_random_next(&seed) % 12);
        const int64_t keep = 1 + (int64_t)(hapt_random_next(&seed) % 4),
                      every = (int64_t)(hapt_random_next(&seed) % 3) * 25;
        for (int i = count - 1; i >= 0; i--) step[i] = at_step += 1 + (int64_t)(hapt_random_next(&seed) % 40);
        for (int i = 0; i < 600; i++) loss[i] = hapt_random_unit(&seed) < 0.02 ? NAN : hapt_random_unit(&seed);
        const struct hapt_history history = {.count = at_step, .loss = round % 5 == 0 ? NULL : loss};
        checkpoint_choose(count, step, keep, every, &history, stays);
        /* The best checkpoint, computed here: least mean of the losses of up to ten steps. */
        double least = INFINITY, mean[40];
        for (int i = 0; i < count; i++) {
            mean[i] = 0;
            int64_t steps = 0;
            for (int64_t s = step[i]; s >= 0 && steps < 10; s--, steps++) mean[i] += loss[s];
            mean[i] =
                step[i] < at_step ? mean[i] / (double)steps : NAN; /* the loss of the newest weights is not known yet */
            if (mean[i] < least) least = mean[i];
        }
        for (int i = 0; i < count; i++) {
            bool must = i < keep, may_be_best = history.loss && isfinite(mean[i]) && fabs(mean[i] - least) < 1e-9;
            int64_t interval = every ? step[i] / every : 0, first = INT64_MAX;
            for (int j = 0; j < count; j++)
                if (interval > 0 && step[j] / every == interval && step[j] < first) first = step[j];
            must = must || (interval > 0 && first == step[i]) || may_be_best;
            CHECK_MESSAGE(stays[i] == must, "round %d: step %lld of %d stays %d, should %d", round, (long long)step[i],
                          count, stays[i], must);
        }
    }
}

/* With validation, the best checkpoint is the oldest one after the validation of least loss, and not before the next.
 */
static void choosing_by_validation(void)
{
    uint64_t seed = 23;
    for (int round = 0; round < 2000; round++) {
        struct hapt_validation validation[20];
        int64_t step[12], at_step = 0;
        bool stays[12];
        double loss[600] = {0};
        const int count = 1 + (int)(hapt_random_next(&seed) % 12);
        for (int i = count - 1; i >= 0; i--) step[i] = at_step += 1 + (int64_t)(hapt_random_next(&seed) % 40);
        struct hapt_history history = {.count = at_step, .loss = loss, .validation = validation};
        for (int64_t s = 0; s <= at_step && history.validation_count < 20;
             s += 1 + (int64_t)(hapt_random_next(&seed) % 60))
            validation[history.validation_count++] =
                (struct hapt_validation){s, hapt_random_unit(&seed) < 0.05 ? NAN : hapt_random_unit(&seed), NAN};
        checkpoint_choose(count, step, 1, 0, &history, stays);
        /* the checkpoint's own validation, computed backwards */
        double least = INFINITY;
        int best = -1;
        for (int i = count - 1; i >= 0; i--) {
            int64_t v = history.validation_count - 1;
            while (validation[v].step > step[i]) v--;
            if (!(validation[v].loss < least)) continue;
            least = validation[v].loss;
            best = i;
        }
        for (int i = 0; i < count; i++)
            CHECK_MESSAGE(stays[i] == (i == 0 || i == best), "round %d: step %lld of %d stays %d, the best is %d",
                          round, (long long)step[i], count, stays[i], best);
    }
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    CHECK(mkdtemp(root) != NULL);
    RUN(making);
    RUN(removing);
    RUN(setting_aside);
    RUN(listing);
    RUN(locking);
    RUN(choosing);
    RUN(choosing_by_validation);
    char command[300];
    snprintf(command, sizeof command, "rm -rf %s", root);
    if (system(command)) fprintf(stderr, "rm failed\n");
    return test_finish();
}
