#ifndef HAPT_VERSION_H
#define HAPT_VERSION_H

#define HAPT_VERSION "0.1.0"

/* Short hash of the commit that the program was built from, with "-dirty" if files had changes; "": built outside git.
 * src/commit.c defines it for the program alone; tests and benches do not have it. */
extern const char hapt_commit[];

#endif
