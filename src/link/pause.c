/* Short waits of a rank that shares its core with others. */
#include <sched.h>
#include <sys/prctl.h>

#include "hapt/link.h"

void hapt_link_sharpen_timers(void)
{
    prctl(PR_SET_TIMERSLACK, 1000UL, 0, 0, 0); /* ns; the default adds 50 us to every sleep */
}

void hapt_link_pause(unsigned *spins)
{
    const unsigned count = (*spins)++;
    if (count < 64) {
        sched_yield();
    } else {
        /* Increasing, up to 0.3 ms. */
        hapt_time_sleep_until(hapt_time_s() + (count < 104 ? 20e-6 : count < 134 ? 100e-6 : 300e-6));
    }
}
