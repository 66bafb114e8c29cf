/* Before MPI starts: the environment that its library reads, and the launcher's view of the job. */
#ifndef HAPT_BASE_LAUNCH_H
#define HAPT_BASE_LAUNCH_H

#include <stdbool.h>

#include "hapt/status.h"

/* Did a launcher start this process? */
bool launch_is_launched(void);
/* Ranks that the launcher says there are; 1: it does not say. */
long launch_size(void);
/* What OpenMPI reads at start-up. Nothing the user set is overwritten. */
void launch_set_environment(void);
/* Process number of OpenMPI's launcher when it is this process's parent; 0: it is not. */
long launch_parent(void);
/* HAPT_ERR_COMM where MPI knows this process alone and the launcher says that there are more. */
enum hapt_status launch_check_size(int world_size);

#endif
