/* The commit that the program was built from. The Makefile defines HAPT_COMMIT for this file alone, so that a new
 * commit compiles one file and links only the program. "": the sources were outside a git repository. */
#include "hapt/version.h"

const char hapt_commit[] = HAPT_COMMIT;
