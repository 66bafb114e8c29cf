#include "hapt/status.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "hapt/text.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards the process's record */
static struct hapt_failure process;
static _Thread_local struct hapt_failure *diverted; /* NULL: this thread fills the process's record */

static struct hapt_failure *record(void)
{
    return diverted ? diverted : &process;
}

/* Default hints, for failures without a hint of their own. */
static const char *usual_hint(enum hapt_status status)
{
    switch (status) {
    case HAPT_ERR_INPUT: return "it is damaged or inconsistent: create it again";
    case HAPT_ERR_MEMORY: return "give the job more host memory";
    case HAPT_ERR_IO: return "check free space and permissions";
    default: return "";
    }
}

enum hapt_status hapt_fail(enum hapt_status status, const char *hint, const char *format, ...)
{
    struct hapt_failure *to = record();
    pthread_mutex_lock(&lock);
    if (to->status == HAPT_OK) {
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(to->message, sizeof to->message, format, arguments);
        va_end(arguments);
        snprintf(to->hint, sizeof to->hint, "%s", hint ? hint : usual_hint(status));
        hapt_text_make_printable(to->message, false);
        hapt_text_make_printable(to->hint, false);
        to->status = status;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

const char *hapt_fail_message(void)
{
    return record()->message;
}

const char *hapt_fail_hint(void)
{
    return record()->hint;
}

void hapt_fail_reset(void)
{
    struct hapt_failure *of = record();
    pthread_mutex_lock(&lock);
    of->status = HAPT_OK;
    of->message[0] = of->hint[0] = '\0';
    pthread_mutex_unlock(&lock);
}

struct hapt_failure *hapt_fail_divert(struct hapt_failure *failure)
{
    struct hapt_failure *before = diverted;
    diverted = failure;
    return before;
}

const char *hapt_status_name(enum hapt_status status)
{
    switch (status) {
    case HAPT_OK: return "fine";
    case HAPT_ERR_USAGE: return "usage";
    case HAPT_ERR_INPUT: return "bad input";
    case HAPT_ERR_INFEASIBLE: return "no feasible plan";
    case HAPT_ERR_MEMORY: return "out of memory";
    case HAPT_ERR_IO: return "input/output";
    case HAPT_ERR_COMM: return "communication";
    case HAPT_ERR_INTERNAL: return "internal";
    case HAPT_STOPPED: return "stopped early";
    }
    return "unknown";
}

void hapt_assert_failed(const char *condition, const char *file, int line)
{
    fprintf(stderr, "hapt: internal error: %s does not hold at %s:%d\nhint: this is a bug of hapt; please report it\n",
            condition, file, line);
    abort();
}
