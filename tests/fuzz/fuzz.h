/* The parts of the fuzzer (fuzz.c): mutations, the processing of a mutated file, and the content of a file. */
#ifndef HAPT_FUZZ_H
#define HAPT_FUZZ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "hapt/arena.h"
#include "hapt/env.h"

/* ---- Random numbers ---- */

static inline int fuzz_below(uint64_t *random, int count)
{
    return count > 0 ? (int)(hapt_random_next(random) % (uint64_t)count) : 0;
}
static inline bool fuzz_chance(uint64_t *random, double probability)
{
    return hapt_random_unit(random) < probability;
}
/* Numbers at which programs often fail; some are near `old`. */
int64_t fuzz_integer(uint64_t *random, int64_t old);
double fuzz_real(uint64_t *random, double old);
const char *fuzz_text(uint64_t *random);

/* ---- Mutations ---- */

/* Replaces a few bytes. Length and offsets stay. */
void fuzz_flip(uint64_t *random, unsigned char *data, size_t size);
/* Changes, moves, removes and inserts bytes. `data` has space for `room` bytes. Returns the new size. */
size_t fuzz_bytes(uint64_t *random, unsigned char *data, size_t size, size_t room);
/* Changes a JSON text to other JSON or to invalid JSON. */
size_t fuzz_json(uint64_t *random, char *text, size_t size, size_t room);
/* Changes objects of an HDF5 file through the HDF5 library, so that all its own checksums are right. `origin`: the file
 * that it is a copy of, whose objects are listed once. */
bool fuzz_tables(uint64_t *random, const char *path, const char *origin);
/* Rewrites the content of an HDF5 file as other programs write it: oldest format, no checksums, contiguous, strings of
 * variable length. */
bool fuzz_foreign(const char *from, const char *to);

/* ---- Processing of a file ---- */

enum fuzz_kind {
    FUZZ_MODEL,
    FUZZ_WEIGHTS,
    FUZZ_TOKENS,
    FUZZ_IMAGES,
    FUZZ_FIELDS,
    FUZZ_PROFILE,
    FUZZ_PLAN,
    FUZZ_CHECKPOINT,
    FUZZ_CLUSTER,
    FUZZ_EFFICIENCY,
    FUZZ_RUN,
    FUZZ_RESUME,
    FUZZ_RAW,
    FUZZ_KINDS
};
const char *fuzz_kind_name(enum fuzz_kind kind);
/* The kind of a file of the corpus, from its name: "plan-mixed.h5". FUZZ_KINDS: none. Checkpoints are folders:
 * FUZZ_RESUME for those from which one rank resumes, FUZZ_CHECKPOINT for others. FUZZ_RAW: inputs of `hapt data`. */
enum fuzz_kind fuzz_kind_of(const char *name);

struct fuzz_place {
    struct hapt_env *env;
    const char *corpus; /* folder */
    const char *output; /* may be written */
    const char *run;    /* a folder that may be written */
    uint64_t *random;
};
/* Does what users do with such a file: runs the commands of hapt in this process. */
enum hapt_status fuzz_use(const struct fuzz_place *place, enum fuzz_kind kind, const char *path);
/* Runs hapt train --resume. The newest checkpoint of the run is the one at `path`, and an older one is valid. *weights:
 * a hash of the final weights; *fell_back: the run resumed from the older one. */
enum hapt_status fuzz_resume(const struct fuzz_place *place, const char *path, uint64_t *weights, bool *fell_back);
/* Reads the file by its own reader and hashes the result. */
enum hapt_status fuzz_read(const struct fuzz_place *place, enum fuzz_kind kind, const char *path, uint64_t *content);
/* Hashes the content of an HDF5 file: names, shapes, values, attributes. 0: it cannot be read. */
uint64_t fuzz_content(const char *path);
/* Writes sizes and checksums of the shards into the checkpoint's manifest, so that damage reaches the readers behind
 * this check. */
bool fuzz_repair(const char *folder);
/* Writes numbers over an existing dataset. */
bool fuzz_put(const char *path, const char *dataset, int64_t count, const int64_t *value);

/* ---- Files (files.c) ---- */

enum { FUZZ_MOST_BYTES = 1 << 20 };
size_t fuzz_load(const char *path, unsigned char *data, size_t room);
bool fuzz_store(const char *path, const unsigned char *data, size_t size);
bool fuzz_is_folder(const char *path);
/* A file, or a folder of files. */
bool fuzz_copy(const char *from, const char *to);
/* Links the files of a folder under new names into another folder. Copies them if links are impossible. */
bool fuzz_link(const char *from, const char *to);
void fuzz_remove(const char *path);

#endif
