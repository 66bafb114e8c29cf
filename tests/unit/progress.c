/* Progress: long work is shown with an estimate of its end, short work is silent, phases nest, and other ranks print
 * nothing. */
#include "test.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <unistd.h>

#include "hapt/progress.h"

static struct hapt_env first = {.world_rank = 0}, second = {.world_rank = 1};

static void wait_s(double seconds)
{
    hapt_time_sleep_until(hapt_time_s() + seconds);
}

/* Returns what `work` writes to standard error, which is a file meanwhile. */
static const char *said(void (*work)(void))
{
    static char text[8192];
    FILE *file = tmpfile();
    fflush(stderr);
    const int before = dup(STDERR_FILENO);
    CHECK(file && before >= 0 && dup2(fileno(file), STDERR_FILENO) >= 0);
    work();
    fflush(stderr);
    dup2(before, STDERR_FILENO);
    close(before);
    rewind(file);
    text[fread(text, 1, sizeof text - 1, file)] = '\0';
    fclose(file);
    return text;
}

/* Reads the terminal up to an end mark. Output passes through a queue of the kernel, so one read may miss the end. */
static void read_shown(int terminal, int mine, char *text, size_t room)
{
    static const char mark[] = "(end)";
    size_t length = 0;
    struct pollfd waits = {.fd = terminal, .events = POLLIN};
    char *end = NULL;
    CHECK(write(mine, mark, sizeof mark - 1) == sizeof mark - 1);
    while (!end && length + 1 < room && poll(&waits, 1, 10000) == 1) {
        const ssize_t more = read(terminal, text + length, room - 1 - length);
        if (more <= 0) break;
        length += (size_t)more;
        text[length] = '\0';
        end = strstr(text, mark);
    }
    CHECK(end != NULL);
    if (end) *end = '\0';
}

/* The same with a terminal. */
static const char *shown(void (*work)(void))
{
    static char text[1 << 16];
    const int terminal = posix_openpt(O_RDWR | O_NOCTTY), before = dup(STDERR_FILENO);
    CHECK(terminal >= 0 && grantpt(terminal) == 0 && unlockpt(terminal) == 0);
    const int mine = open(ptsname(terminal), O_RDWR | O_NOCTTY);
    CHECK(mine >= 0);
    fflush(stderr);
    dup2(mine, STDERR_FILENO);
    work();
    fflush(stderr);
    dup2(before, STDERR_FILENO);
    read_shown(terminal, mine, text, sizeof text);
    close(before), close(mine), close(terminal);
    return text;
}

static int lines_of(const char *text)
{
    int count = 0;
    for (; *text; text++) count += *text == '\n';
    return count;
}

/* Many updates in a short time. */
static void work_quickly(void)
{
    struct hapt_progress progress;
    hapt_progress_init(&progress, &first, "quick", 1000);
    for (int i = 0; i < 1000; i++) hapt_progress_update(&progress, i, "");
    hapt_progress_expect(5);
    hapt_progress_advance(5);
    wait_s(0.3);
    hapt_progress_release(&progress);
}

/* One long call after a quarter of the work. There are no updates meanwhile. */
static void work_long(void)
{
    struct hapt_progress progress;
    hapt_progress_init(&progress, &first, "long", 4);
    wait_s(0.5);
    hapt_progress_update(&progress, 1, "a detail");
    wait_s(1.8);
    hapt_progress_release(&progress);
}

static void *add_parts(void *unused)
{
    for (int i = 0; i < 50; i++) hapt_progress_advance(1);
    return unused;
}

/* The command does not know the parts. Lower rooms report them in phases of their own and from other threads. */
static void work_nested(void)
{
    struct hapt_progress progress, within, deeper;
    pthread_t thread;
    hapt_progress_init(&progress, &first, "outer", 0);
    hapt_progress_init(&within, NULL, "inner", 2);
    hapt_progress_update(&within, 1, NULL);
    hapt_progress_expect(100);
    CHECK(pthread_create(&thread, NULL, add_parts, NULL) == 0);
    pthread_join(thread, NULL);
    hapt_progress_init(&deeper, NULL, "deeper", 8); /* the outer phase leaves the inner one's progress unchanged */
    hapt_progress_advance(3);
    hapt_progress_release(&deeper);
    wait_s(2.3);
    hapt_progress_release(&within);
    hapt_progress_release(&progress);
}

static void work_elsewhere(void)
{
    struct hapt_progress progress, alone;
    hapt_progress_init(&alone, NULL, "nobody's", 2); /* no outer phase */
    hapt_progress_init(&progress, &second, "other", 2);
    hapt_progress_expect(1);
    wait_s(2.2);
    hapt_progress_update(&progress, 1, "");
    hapt_progress_release(&progress);
    hapt_progress_release(&alone);
}

/* --progress-every 0 */
static void work_each_step(void)
{
    struct hapt_progress progress;
    hapt_progress_init(&progress, &first, "train", 3);
    progress.every_s = 0;
    for (int i = 1; i <= 3; i++) hapt_progress_update(&progress, i, "loss 1");
    hapt_progress_release(&progress);
}

/* Lines of steps, of which one is due in each half second, and the last one. */
static double lasted_s;

static void work_with_lines(void)
{
    struct hapt_progress progress;
    char line[32];
    const double start_s = hapt_time_s();
    hapt_progress_init(&progress, &first, "train", 14);
    progress.every_s = 0.5;
    for (int i = 1; i <= 14; i++) {
        wait_s(0.1);
        snprintf(line, sizeof line, "line of %d", i);
        hapt_progress_keep(&progress, i, "loss 1", line);
    }
    hapt_progress_release(&progress);
    lasted_s = hapt_time_s() - start_s;
}

/* One long step between lines: it is no news yet. */
static void work_with_a_long_step(void)
{
    struct hapt_progress progress;
    hapt_progress_init(&progress, &first, "train", 3);
    progress.every_s = 0.1;
    wait_s(0.2);
    hapt_progress_keep(&progress, 1, "loss 1", "one");
    wait_s(5.6);
    hapt_progress_keep(&progress, 2, "loss 1", "two");
    hapt_progress_release(&progress);
}

static void quick_is_silent(void)
{
    const char *text = said(work_quickly);
    CHECK_MESSAGE(*text == '\0', "printed: %s", text);
}

static void long_is_said(void)
{
    const char *text = said(work_long);
    double left = -1;
    CHECK_MESSAGE(lines_of(text) == 1, "printed: %s", text);
    CHECK_MESSAGE(sscanf(text, "hapt: long 1/4, a detail, %lf s left", &left) == 1, "printed: %s", text);
    CHECK_MESSAGE(left >= 5 && left <= 8, "2 s for a quarter: %s",
                  text); /* three more; the numbers are rounded, and a busy machine is late */
}

static void terminal_has_a_bar(void)
{
    const char *text = shown(work_long);
    CHECK_MESSAGE(strncmp(text, "\rlong [######..................] 1/4, a detail, ", 48) == 0, "shown: %s", text);
    CHECK_MESSAGE(lines_of(text) == 0 && strcmp(text + strlen(text) - 4, "\r\033[K") == 0, "it is removed: %s", text);
    text = shown(work_quickly);
    CHECK_MESSAGE(*text == '\0', "shown: %s", text);
}

static void nested_counts(void)
{
    const char *text = said(work_nested);
    double left = -1;
    CHECK_MESSAGE(lines_of(text) == 1, "printed: %s", text);
    CHECK_MESSAGE(sscanf(text, "hapt: outer, inner 1/2, %lf s left", &left) == 1, "printed: %s", text);
    CHECK_MESSAGE(left >= 0 && left <= 1.5, "three quarters in 2 s: %s", text);
}

static void others_are_silent(void)
{
    const char *text = said(work_elsewhere);
    CHECK_MESSAGE(*text == '\0', "printed: %s", text);
}

static void each_step_is_said(void)
{
    const char *text = said(work_each_step);
    CHECK_MESSAGE(lines_of(text) == 3 && strstr(text, "train 1/3, loss 1, ") &&
                      strstr(text, "train 3/3, loss 1, 0 s left"),
                  "printed: %s", text);
}

/* A busy machine may be late, so a line may be of a later step. */
static void steps_are_kept(void)
{
    const char *text = said(work_with_lines);
    CHECK_MESSAGE(lines_of(text) >= 2 && lines_of(text) <= lasted_s / 0.5 + 2, "in %.2f s: %s", lasted_s, text);
    CHECK_MESSAGE(strncmp(text, "hapt: train ", 12) == 0 && strstr(text, "hapt: train 14/14 line of 14\n"),
                  "printed: %s", text);
    text = said(work_with_a_long_step);
    CHECK_MESSAGE(lines_of(text) == 2 && strstr(text, "hapt: train 1/3 one\n") && strstr(text, "hapt: train 2/3 two\n"),
                  "printed: %s", text);
    text = shown(work_with_lines);
    CHECK_MESSAGE(lines_of(text) >= 2 && strstr(text, "hapt: train 14/14 line of 14\r\n"), "shown: %s", text);
    CHECK_MESSAGE(strstr(text, "\n\rtrain [") && strcmp(text + strlen(text) - 4, "\r\033[K") == 0,
                  "the bar is drawn again, and removed: %s", text);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(quick_is_silent);
    RUN(each_step_is_said);
    RUN(long_is_said);
    RUN(terminal_has_a_bar);
    RUN(nested_counts);
    RUN(others_are_silent);
    RUN(steps_are_kept);
    return test_finish();
}
