/* Chooses the output folder of a run and keeps other jobs out of it: include/hapt/run_folder.h. */
#include "hapt/run_folder.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "checkpoint.h"
#include "runtime.h"
#include "hapt/folder.h"
#include "hapt/lock.h"
#include "hapt/text.h"

#define OVERWRITTEN "overwritten"
#define INPUT_NOTE ".hapt-input" /* in a folder with a default name: the input that it was named after */
enum { MOST_RUNS = 10000, MOST_PATH = 4096, MOST_NAME = 256 };

/* Created by the claim; removed again if no run uses it. On rank 0. */
static struct {
    char folder[MOST_PATH];
    bool made_folder, made_checkpoints, noted;
} claimed;

/* ---- Names ---- */

static const char *input_name(const struct hapt_config *config)
{
    const char *input = hapt_config_text(config, "input");
    return input ? hapt_text_base_name(input) : "run";
}

enum hapt_status hapt_run_folder_name(const struct hapt_config *config, struct hapt_arena *arena, const char **folder)
{
    const char *output = hapt_config_text(config, "output");
    if (!output) {
        const char *name = input_name(config), *dot = strrchr(name, '.');
        const int length = dot && dot > name ? (int)(dot - name) : (int)strlen(name);
        output =
            hapt_arena_printf(arena, "outputs/%.*s%s", length, name, runtime_is_modelled(config) ? "-emulated" : "");
    }
    if (!output) return HAPT_ERR_MEMORY;
    *folder = output;
    return HAPT_OK;
}

static bool is_there(const char *folder, const char *name)
{
    char path[MOST_PATH];
    struct stat about;
    return snprintf(path, sizeof path, "%s/%s", folder, name) < MOST_PATH && lstat(path, &about) == 0;
}

static bool note_checkpoint(void *context, const char *name)
{
    *(bool *)context = *(bool *)context || strncmp(name, "step-", 5) == 0;
    return !*(bool *)context;
}

/* True for a run file, or a checkpoint in any state. An unreadable folder is an error, not an empty one. */
static enum hapt_status holds_run(const char *folder, bool *holds)
{
    char path[MOST_PATH];
    struct stat about;
    *holds = is_there(folder, "run.h5");
    if (snprintf(path, sizeof path, "%s/checkpoints", folder) >= MOST_PATH)
        return hapt_fail(HAPT_ERR_IO, "use a shorter path", "path too long: %.60s...", folder);
    if (lstat(path, &about) != 0 && errno == ENOTDIR)
        return hapt_fail(HAPT_ERR_IO, "give the path of a folder", "%s is a file, not a folder", folder);
    if (lstat(path, &about) == 0 && !S_ISDIR(about.st_mode))
        return hapt_fail(HAPT_ERR_IO, "remove it, or choose another --output",
                         "%s is %s: checkpoints are written only into a folder that belongs to the run", path,
                         S_ISLNK(about.st_mode) ? "a symbolic link" : "not a folder");
    return *holds ? HAPT_OK : hapt_folder_list(path, note_checkpoint, holds);
}

/* True if the folder was numbered for this input. outputs/gpt-2 may also belong to another input, gpt-2.h5. */
static bool is_numbered_for(const char *folder, const char *input)
{
    char path[MOST_PATH], text[MOST_NAME] = "";
    if (snprintf(path, sizeof path, "%s/" INPUT_NOTE, folder) >= MOST_PATH) return false;
    const int descriptor = open(path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    if (descriptor < 0) return false;
    const ssize_t bytes = read(descriptor, text, sizeof text - 1);
    close(descriptor);
    return bytes > 0 && strcmp(text, input) == 0;
}

static void note_input(const char *folder, const char *input)
{
    char path[MOST_PATH];
    snprintf(path, sizeof path, "%s/" INPUT_NOTE, folder);
    const int descriptor = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (descriptor < 0) return; /* it exists, or --resume will need --output */
    claimed.noted = write(descriptor, input, strnlen(input, MOST_NAME - 1)) > 0;
    close(descriptor);
}

static char *numbered(const char *base, int number, struct hapt_arena *arena)
{
    return number == 1 ? hapt_arena_strdup(arena, base) : hapt_arena_printf(arena, "%s-%d", base, number);
}

struct numbers {
    const char *base, *name, *input; /* name: the last part of base */
    long last;
};

static bool note_number(void *context, const char *name)
{
    struct numbers *numbers = context;
    char path[MOST_PATH], *end;
    struct stat about;
    const size_t length = strlen(numbers->name);
    if (strncmp(name, numbers->name, length) != 0 || name[length] != '-') return true;
    const long number = strtol(name + length + 1, &end, 10);
    if (*end || number <= numbers->last || snprintf(path, sizeof path, "%s-%ld", numbers->base, number) >= MOST_PATH)
        return true;
    if (stat(path, &about) == 0 && S_ISDIR(about.st_mode) && is_numbered_for(path, numbers->input))
        numbers->last = number;
    return true;
}

/* The run that --resume continues: the last one of this input. */
static enum hapt_status last_numbered(const char *base, const char *input, struct hapt_arena *arena,
                                      const char **folder)
{
    const char *slash = strrchr(base, '/');
    struct numbers numbers = {base, slash ? slash + 1 : base, input, 1};
    const char *parent = slash ? hapt_arena_printf(arena, "%.*s/.", (int)(slash - base), base) : ".";
    if (!parent) return HAPT_ERR_MEMORY;
    HAPT_TRY(hapt_folder_list(parent, note_number, &numbers));
    *folder = numbered(base, (int)numbers.last, arena);
    return *folder ? HAPT_OK : HAPT_ERR_MEMORY;
}

/* ---- Claiming the folder ---- */

/* Creates the folder, takes its lock, creates checkpoints/, and tests writing. */
static enum hapt_status take(const char *folder, struct hapt_arena *arena)
{
    const char *checkpoints = hapt_arena_printf(arena, "%s/checkpoints", folder);
    struct stat about;
    if (!checkpoints) return HAPT_ERR_MEMORY;
    const bool new_folder = stat(folder, &about) != 0;
    HAPT_TRY(hapt_folder_make(folder));
    const enum hapt_status taken = hapt_lock_take(folder);
    if (taken != HAPT_OK && new_folder) rmdir(folder); /* fails if another job uses it */
    HAPT_TRY(taken);
    snprintf(claimed.folder, sizeof claimed.folder, "%s", folder);
    claimed.made_folder = new_folder;
    claimed.made_checkpoints = lstat(checkpoints, &about) != 0;
    HAPT_TRY(hapt_folder_make(checkpoints));
    return hapt_folder_try(checkpoints);
}

static enum hapt_status refuse_run(const char *folder)
{
    return hapt_fail(HAPT_ERR_USAGE,
                     "--resume yes continues it, another --output keeps it, --overwrite yes replaces it",
                     "%s already holds a run", folder);
}

/* Takes the first name that is neither in use nor holds a run. */
static enum hapt_status take_numbered(const char *base, const char *input, struct hapt_arena *arena,
                                      const char **folder)
{
    for (int number = 1; number < MOST_RUNS; number++) {
        char owner[256];
        bool holds = false;
        const char *next = numbered(base, number, arena);
        struct stat about;
        if (!next) return HAPT_ERR_MEMORY;
        if (stat(next, &about) == 0 && !S_ISDIR(about.st_mode)) continue; /* a file has that name */
        HAPT_TRY(holds_run(next, &holds));
        if (holds || hapt_lock_look(next, owner, sizeof owner) == HAPT_LOCK_HELD) continue;
        const enum hapt_status status = take(next, arena);
        if (status == HAPT_ERR_USAGE) { /* another job was faster */
            hapt_fail_reset();
            continue;
        }
        HAPT_TRY(status);
        HAPT_TRY(holds_run(next, &holds));
        if (holds) { /* another job ran here and has ended */
            hapt_lock_release();
            continue;
        }
        note_input(next, input);
        *folder = next;
        return HAPT_OK;
    }
    return hapt_fail(HAPT_ERR_USAGE, "give --output", "%s and %d numbered folders beside it hold runs", base,
                     MOST_RUNS);
}

static enum hapt_status choose_and_take(const struct hapt_config *config, struct hapt_arena *arena, const char **folder)
{
    const bool overwrites = hapt_config_bool(config, "overwrite"),
               resumes = strcmp(hapt_config_text(config, "resume"), "no") != 0;
    bool holds = false;
    if (overwrites && resumes)
        return hapt_fail(HAPT_ERR_USAGE, "leave out one of them",
                         "--resume continues the run of the folder, --overwrite yes replaces it");
    HAPT_TRY(hapt_run_folder_name(config, arena, folder));
    if (!hapt_config_text(config, "output")) {
        if (!overwrites && !resumes) return take_numbered(*folder, input_name(config), arena, folder);
        HAPT_TRY(last_numbered(*folder, input_name(config), arena, folder));
    }
    HAPT_TRY(holds_run(*folder, &holds));
    if (holds && !overwrites && !resumes) return refuse_run(*folder);
    HAPT_TRY(take(*folder, arena));
    HAPT_TRY(holds_run(*folder, &holds));
    return holds && !overwrites && !resumes ? refuse_run(*folder) : HAPT_OK;
}

/* Checks that this host sees the lock and can write to the folder. Otherwise the first checkpoint would fail. */
static enum hapt_status try_from_here(const struct hapt_env *env, const char *folder, const char *token,
                                      struct hapt_arena *arena)
{
    const char *checkpoints = hapt_arena_printf(arena, "%s/checkpoints", folder);
    if (!checkpoints) return HAPT_ERR_MEMORY;
    if (env->node_rank != 0 || env->world_rank == 0) return HAPT_OK;
    if (!hapt_lock_visible(folder, token))
        return hapt_fail(HAPT_ERR_IO, "give an --output on a file system that all hosts share",
                         "folder %s of rank 0 is not visible from host %s", folder, hapt_env_host(env->world_rank));
    return hapt_folder_try(checkpoints);
}

void hapt_run_folder_leave(const struct hapt_env *env)
{
    char path[MOST_PATH + 16];
    hapt_env_barrier(env); /* a rank may still be writing a shard */
    if (claimed.made_checkpoints) {
        snprintf(path, sizeof path, "%s/checkpoints", claimed.folder);
        rmdir(path);
    }
    hapt_lock_release();
    snprintf(path, sizeof path, "%s/" INPUT_NOTE, claimed.folder);
    bool holds = true;
    if (claimed.noted && holds_run(claimed.folder, &holds) == HAPT_OK && !holds) unlink(path);
    if (claimed.made_folder) rmdir(claimed.folder);
    memset(&claimed, 0, sizeof claimed);
}

enum hapt_status hapt_run_folder_claim(const struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena)
{
    struct {
        char folder[MOST_PATH], token[HAPT_LOCK_TOKEN_CHARS + 1];
    } told = {"", ""};
    enum hapt_status status = HAPT_OK;
    if (env->world_rank == 0) {
        const char *folder = NULL;
        status = choose_and_take(config, arena, &folder);
        if (status == HAPT_OK) {
            snprintf(told.folder, sizeof told.folder, "%s", folder);
            snprintf(told.token, sizeof told.token, "%s", hapt_lock_token());
        }
    }
    HAPT_TRY(hapt_env_agree(env->world, status));
    HAPT_MPI(MPI_Bcast(&told, (int)sizeof told, MPI_BYTE, 0, env->world));
    HAPT_TRY(hapt_env_agree(env->world, try_from_here(env, told.folder, told.token, arena)));
    if (!hapt_config_text(config, "output")) hapt_note(env, "output folder %s\n", told.folder);
    return hapt_config_preset(config, "output", told.folder);
}

/* ---- Overwriting ---- */

enum hapt_status hapt_run_folder_begin(const struct hapt_config *config, const char *folder)
{
    static const char *const name[] = {"checkpoints", "run.h5", "metrics.csv", "tensorboard"};
    char now[MOST_NAME];
    bool holds = false;
    if (!hapt_config_bool(config, "overwrite")) return HAPT_OK;
    HAPT_TRY(holds_run(folder, &holds));
    for (int i = 0; holds && i < 4; i++) {
        if (!is_there(folder, name[i])) continue;
        if (!hapt_folder_rename_with_suffix(folder, name[i], OVERWRITTEN, now, sizeof now))
            return hapt_fail(HAPT_ERR_IO, "check the rights in the output folder", "%s/%s cannot be renamed: %s",
                             folder, name[i], strerror(errno));
    }
    return HAPT_OK;
}

static bool is_event_file(const char *name)
{
    return strncmp(name, "events.out.tfevents.", sizeof "events.out.tfevents." - 1) == 0;
}

/* NAME.overwritten, or NAME.overwritten-2, ... */
static bool is_overwritten(const char *name, const char *of)
{
    const size_t length = strlen(of);
    return strncmp(name, of, length) == 0 && strncmp(name + length, "." OVERWRITTEN, sizeof "." OVERWRITTEN - 1) == 0;
}

static bool remove_overwritten(void *context, const char *name)
{
    const char *folder = context;
    char path[MOST_PATH];
    if (snprintf(path, sizeof path, "%s/%s", folder, name) >= MOST_PATH) return true;
    if (is_overwritten(name, "checkpoints") && hapt_folder_is(path)) checkpoint_remove_all(path);
    if (is_overwritten(name, "run.h5") || is_overwritten(name, "metrics.csv")) unlink(path);
    if (is_overwritten(name, "tensorboard")) hapt_folder_remove(folder, name, is_event_file);
    return true;
}

void hapt_run_folder_first_checkpoint(const char *folder)
{
    char path[MOST_PATH]; /* "/." because the user may have made the folder itself a link */
    if (snprintf(path, sizeof path, "%s/.", folder) < MOST_PATH &&
        hapt_folder_list(path, remove_overwritten, path) != HAPT_OK)
        hapt_fail_reset();
}
