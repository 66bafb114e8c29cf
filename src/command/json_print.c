#include "json_print.h"

#include <stdio.h>

enum hapt_status hapt_json_print(json_t *object, const char *what, size_t indent)
{
    if (!object) return hapt_fail(HAPT_ERR_MEMORY, NULL, "%s JSON could not be built", what);
    const int error = json_dumpf(object, stdout, JSON_INDENT(indent));
    json_decref(object);
    if (error || putchar('\n') == EOF || fflush(stdout) != 0)
        return hapt_fail(HAPT_ERR_IO, "check free space and the pipe's reader", "standard output cannot be written");
    return HAPT_OK;
}
