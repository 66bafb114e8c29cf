/* Before MPI starts: the environment that its library reads, and the launcher's description of the job. */
#ifndef HAPT_BASE_LAUNCH_H
#define HAPT_BASE_LAUNCH_H

#include <stdbool.h>

#include "hapt/status.h"

/* True if a launcher started this process. */
bool launch_is_launched(void);
/* Number of ranks according to the launcher; 1: unknown. */
long launch_size(void);
/* Sets what OpenMPI reads at start-up. Does not overwrite settings of the user. */
void launch_set_environment(void);
/* Process number of OpenMPI's launcher if it is the parent of this process; otherwise 0. */
long launch_parent(void);
/* HAPT_ERR_COMM if MPI has one process but the launcher started more. */
enum hapt_status launch_check_size(int world_size);

#endif
