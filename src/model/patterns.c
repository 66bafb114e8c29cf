/* Shell patterns of parameter names, separated by commas. */
#include <fnmatch.h>
#include <stdio.h>
#include <string.h>

#include "hapt/model.h"

enum { MAX_PATTERN = 256 }; /* names have at most 200 characters */

/* Copies the next pattern and moves *at behind it; false: there is none. One that is too long becomes "". */
static bool next_pattern(const char **at, char pattern[MAX_PATTERN])
{
    while (**at == ',') (*at)++;
    if (!**at) return false;
    const size_t length = strcspn(*at, ",");
    snprintf(pattern, MAX_PATTERN, "%.*s", length < MAX_PATTERN ? (int)length : 0, *at);
    *at += length;
    return true;
}

bool hapt_patterns_match(const char *patterns, const char *name)
{
    char pattern[MAX_PATTERN];
    while (next_pattern(&patterns, pattern))
        if (fnmatch(pattern, name, 0) == 0) return true;
    return false;
}

enum hapt_status hapt_patterns_check(const char *option, const char *patterns, const struct hapt_graph *graph)
{
    char pattern[MAX_PATTERN];
    while (next_pattern(&patterns, pattern)) {
        bool found = false;
        for (int t = 0; t < graph->tensor_count && !found; t++)
            found = graph->tensor[t].kind == HAPT_TENSOR_PARAMETER && fnmatch(pattern, graph->tensor[t].name, 0) == 0;
        if (found) continue;
        return hapt_fail(HAPT_ERR_USAGE, "patterns are the shell's: \"model.layers.[01].*\"; commas separate them",
                         "--%s: no parameter has a name like %s", option, pattern);
    }
    return HAPT_OK;
}
