/* Private to src/command: prints the result of a command as JSON (--json). */
#ifndef HAPT_COMMAND_JSON_PRINT_H
#define HAPT_COMMAND_JSON_PRINT_H

#include <jansson.h>

#include "hapt/status.h"

/* Prints on standard output, and releases `object` (NULL: it could not be made; `what` names it). `indent`: 0 prints
 * one line. */
enum hapt_status hapt_json_print(json_t *object, const char *what, size_t indent);

#endif
