/* Before MPI starts: the environment that its library reads, and the launcher's description of the job. */
#include "launch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "hapt/env.h"

/* OpenMPI's shared-memory segments per rank: 4 MB for messages, and windows. */
#define SEGMENT_BYTES 6e6
#define SEGMENTS_BESIDE 16e6

bool launch_is_launched(void)
{
    return getenv("PMIX_RANK") || getenv("OMPI_COMM_WORLD_SIZE") || getenv("PMI_RANK");
}

long launch_size(void)
{
    const char *size = getenv("OMPI_COMM_WORLD_SIZE");
    if (!size) size = getenv("SLURM_STEP_NUM_TASKS");
    return size && atol(size) > 0 ? atol(size) : 1;
}

long launch_parent(void)
{
    static const char *const known[] = {"mpirun", "mpiexec", "orterun", "prterun"};
    char path[64], name[32];
    snprintf(path, sizeof path, "/proc/%ld/comm", (long)getppid());
    hapt_first_line(path, name, sizeof name);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(name, known[i]) == 0) return (long)getppid();
    return 0;
}

static double free_bytes(const char *folder)
{
    struct statvfs about;
    return statvfs(folder, &about) == 0 && access(folder, W_OK) == 0 ? (double)about.f_bavail * (double)about.f_frsize
                                                                     : 0;
}

/* Containers often have 64 MB in /dev/shm, or none; then MPI's segments go to a folder with room. If no folder has
 * room, ranks of one host use TCP: MPI_Init would end the job without a message of hapt if vader cannot create its
 * segment. */
static void choose_segment_folder(long ranks)
{
    static const char *const setting[] = {"OMPI_MCA_btl_vader_backing_directory", "OMPI_MCA_osc_sm_backing_directory",
                                          "OMPI_MCA_osc_rdma_backing_directory"};
    const char *const folder[] = {getenv("TMPDIR"), "/tmp", "/var/tmp"};
    const double needed = SEGMENTS_BESIDE + SEGMENT_BYTES * (double)ranks;
    if (free_bytes("/dev/shm") >= needed) return;
    for (size_t f = 0; f < sizeof folder / sizeof *folder; f++) {
        if (!folder[f] || free_bytes(folder[f]) < needed) continue;
        for (size_t s = 0; s < sizeof setting / sizeof *setting; s++) setenv(setting[s], folder[f], 0);
        return;
    }
    if (ranks > 1) setenv("OMPI_MCA_btl", "^vader,sm", 0);
}

static long launched_rank; /* PMIx's rank of this process: MPI_Init overwrites it */

void launch_set_environment(void)
{
    const char *rank = getenv("PMIX_RANK");
    launched_rank = rank ? atol(rank) : 0;
    const char *local = getenv("OMPI_COMM_WORLD_LOCAL_SIZE");
    const char *ranks = local ? local : getenv("SLURM_NTASKS_PER_NODE");
    if (!launch_is_launched()) {
        /* A single process needs no network transport and no daemon; this saves 0.3 s. */
        setenv("OMPI_MCA_pml", "ob1", 0);
        setenv("OMPI_MCA_ess_singleton_isolated", "1", 0);
        /* Single processes of one user would share a session folder, which each removes at its end: 1 of 100 starts
         * failed beside three others. */
        setenv("OMPI_MCA_orte_create_session_dirs", "0", 0);
    }
    /* No stack trace of Open MPI in a signal handler: it allocates, and waits forever if the heap was locked. */
    setenv("OMPI_MCA_opal_signal", "", 0);
    choose_segment_folder(ranks && atol(ranks) > 0 ? atol(ranks) : 1);
    /* Spinning ranks that share a core slow each other down. */
    if (ranks && atol(ranks) > sysconf(_SC_NPROCESSORS_ONLN)) setenv("OMPI_MCA_mpi_yield_when_idle", "1", 0);
}

enum hapt_status launch_check_size(int world_size)
{
    static const struct {
        const char *size, *launcher, *hint;
        const char *with; /* counts only if this is set as well */
    } said[] = {{"SLURM_STEP_NUM_TASKS", "Slurm", "start the step with srun --mpi=pmix", "SLURM_STEP_ID"},
                {"SLURM_NTASKS", "Slurm", "start the step with srun --mpi=pmix", "SLURM_STEP_ID"},
                {"OMPI_COMM_WORLD_SIZE", "OpenMPI's mpirun",
                 "start with the mpirun of the MPI library that hapt is linked with (hapt doctor)", NULL},
                {"PMI_SIZE", "the launcher (PMI)",
                 "start with the mpirun of the MPI library that hapt is linked with (hapt doctor)", NULL},
                {"MV2_COMM_WORLD_SIZE", "MVAPICH's mpirun",
                 "start with the mpirun of the MPI library that hapt is linked with (hapt doctor)", NULL},
                {"FLUX_JOB_SIZE", "Flux", "start with flux run -o mpi=openmpi", NULL},
                {"PALS_LOCAL_SIZE", "PALS",
                 "start with the mpirun of the MPI library that hapt is linked with (hapt doctor)", NULL}};
    if (world_size > 1) return HAPT_OK;
    for (size_t i = 0; i < sizeof said / sizeof *said; i++) {
        const char *size = getenv(said[i].size);
        if (!size || atol(size) <= 1 || (said[i].with && !getenv(said[i].with))) continue;
        /* The step's number of tasks has priority over the job's. */
        if (i == 1 && getenv(said[0].size)) continue;
        return hapt_fail(HAPT_ERR_COMM, said[i].hint,
                         "this process is alone although %s started %s tasks: the launcher and MPI do not cooperate",
                         said[i].launcher, size);
    }
    if (launched_rank > 0)
        return hapt_fail(HAPT_ERR_COMM, "start with a launcher that supports the PMIx of the MPI library",
                         "this process is alone although PMIx says that it is rank %ld", launched_rank);
    return HAPT_OK;
}
