/* ranks: 1 4
 * The ranks of a node check a file in the sandbox once together, and all learn the result. */
#include "hapt/sandbox.h"

#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include "test.h"

static bool trial_read(const char *path)
{
    if (!path) return true;
    FILE *file = fopen(path, "r+");
    usleep(20000); /* long enough for the others to arrive */
    if (!file || fseek(file, 0, SEEK_END) || fputc('+', file) < 0 || fclose(file)) _exit(1);
    if (strstr(path, "bad")) raise(SIGSEGV);
    return true;
}

/* All ranks check the file at about the same time. How often is it read? */
static void check_together(const char *folder, const char *name, enum hapt_status expected)
{
    char path[256];
    struct stat about, after;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    if (test_env.world_rank == 0) {
        FILE *file = fopen(path, "w");
        CHECK(file && fclose(file) == 0);
    }
    MPI_Barrier(test_env.world);
    CHECK(stat(path, &about) == 0);
    MPI_Barrier(test_env.world);
    for (int i = 0; i < 3; i++) {
        CHECK(hapt_sandbox_check(path, &about) == expected);
        CHECK((hapt_fail_message()[0] != '\0') == (expected != HAPT_OK));
        hapt_fail_reset();
    }
    MPI_Barrier(test_env.world);
    CHECK(stat(path, &after) == 0);
    const long each = expected == HAPT_OK ? 1 : 2; /* a file that kills a child is read by a second child */
    const long most =
        each *
        (expected == HAPT_OK || test_env.node_size > 1 ? 1 : 3); /* a single process does not remember bad files */
    CHECK_MESSAGE(after.st_size >= 1 && after.st_size <= most, "asked %ld times", (long)after.st_size);
    MPI_Barrier(test_env.world); /* a bad file may be deleted */
}

int main(int argc, char **argv)
{
    hapt_sandbox_start(argv, trial_read);
    test_init_mpi(&argc, &argv);
    hapt_sandbox_share(&test_env);
    char folder[] = "/tmp/hapt-sandbox-XXXXXX";
    if (test_env.world_rank == 0) CHECK(mkdtemp(folder) != NULL);
    MPI_Bcast(folder, (int)sizeof folder, MPI_CHAR, 0, test_env.world);
    for (int i = 0; i < 5; i++) {
        char name[32];
        snprintf(name, sizeof name, "good-%d", i);
        check_together(folder, name, HAPT_OK);
        snprintf(name, sizeof name, "bad-%d", i);
        check_together(folder, name, HAPT_ERR_INPUT);
    }
    if (test_env.world_rank == 0) {
        char command[300];
        snprintf(command, sizeof command, "rm -r %s", folder);
        CHECK(system(command) == 0);
    }
    const int code = test_finish();
    hapt_sandbox_stop();
    return code;
}
