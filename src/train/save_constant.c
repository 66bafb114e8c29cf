/* Frozen weights in checkpoints: written once, and linked into the later checkpoints of a run. */
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "save.h"

/* Tries whether a file of the folder can have two names. */
static bool folder_links(const char *folder, struct hapt_arena *arena)
{
    const char *name = hapt_arena_printf(arena, "%s/.try-%ld-link", folder, (long)getpid());
    const char *second = hapt_arena_printf(arena, "%s/.try-%ld-linked", folder, (long)getpid());
    const int descriptor = name && second ? open(name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666) : -1;
    if (descriptor < 0) return false;
    close(descriptor);
    const bool links = link(name, second) == 0;
    if (links) unlink(second);
    unlink(name);
    return links;
}

/* True if the checkpoint is one of this folder. */
static bool is_here(const struct hapt_checkpoint *checkpoint, const char *folder, struct hapt_arena *arena)
{
    struct stat here, there;
    const char *path = checkpoint_folder(arena, folder, checkpoint->step);
    return path && lstat(path, &here) == 0 && S_ISDIR(here.st_mode) && stat(checkpoint->path, &there) == 0 &&
           here.st_dev == there.st_dev && here.st_ino == there.st_ino;
}

/* True if the shards of the checkpoint have the tensors that this run's have. */
static bool is_divided_alike(const struct hapt_checkpoint *checkpoint, const struct hapt_checkpoint_writer *writer)
{
    if (checkpoint->sampled || checkpoint->shard_count != writer->shard_count ||
        checkpoint->parameter_count != writer->parameter_count)
        return false;
    for (int64_t p = 0; p < writer->parameter_count; p++)
        if (strcmp(checkpoint->parameter[p], writer->parameter[p]) != 0 ||
            checkpoint->parameter_shard[p] != writer->parameter_shard[p] ||
            checkpoint->parameter_states[p] != writer->parameter_states[p])
            return false;
    return true;
}

/* Keeps the constant shards of the checkpoint that the run resumed from, if that can be. All ranks agree. */
static enum hapt_status keep_constant(struct saver *saver, const struct hapt_checkpoint *checkpoint)
{
    const struct hapt_checkpoint_writer *writer = &saver->writer;
    const int shard = writer->constant_shard;
    int kept = 1;
    if (shard >= 0) {
        struct stat about;
        const char *path = checkpoint_shard_path(saver->worker->arena, checkpoint->path, shard);
        saver->constant.size = checkpoint->size[shard];
        saver->constant.checksum = checkpoint->checksum[shard];
        kept = path && lstat(path, &about) == 0 && S_ISREG(about.st_mode) &&
               checkpoint_keep_constant(writer, path) == HAPT_OK;
        if (!kept) hapt_fail_reset();
    }
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, &kept, 1, MPI_INT, MPI_MIN, saver->env->world));
    saver->constant.linked = kept != 0;
    if (!kept && shard >= 0) checkpoint_drop_constant(writer);
    return HAPT_OK;
}

enum hapt_status saver_find_links(struct saver *saver, const struct hapt_checkpoint *checkpoint)
{
    const struct hapt_checkpoint_writer *writer = &saver->writer;
    struct hapt_arena *arena = saver->worker->arena;
    int found[2] = {0, 0}; /* links; the checkpoint is in this folder */
    if (!writer->write_constant) return HAPT_OK;
    if (saver->env->world_rank == 0) {
        found[0] = folder_links(writer->folder, arena);
        found[1] = checkpoint && is_here(checkpoint, writer->folder, arena);
    }
    HAPT_MPI(MPI_Bcast(found, 2, MPI_INT, 0, saver->env->world));
    saver->constant.links = found[0];
    if (found[0]) return found[1] && is_divided_alike(checkpoint, writer) ? keep_constant(saver, checkpoint) : HAPT_OK;
    hapt_note(saver->env,
              "the file system has no hard links: each checkpoint has its own copy of the frozen weights\n");
    saver->copy_bytes += saver->constant_bytes;
    return HAPT_OK;
}
