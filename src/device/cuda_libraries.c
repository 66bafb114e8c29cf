/* Finds CUDA's shared libraries: through the loader first, then in folders that it does not know. */
#include "cuda_libraries.h"

#include <dlfcn.h>
#include <elf.h>
#include <glob.h>
#include <limits.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LIBRARIES = 8, NAME_CHARS = 64, ERROR_CHARS = 512, LINKS = 8 };

struct found {
    char soname[NAME_CHARS], path[PATH_MAX], error[ERROR_CHARS], hint[ERROR_CHARS];
    void *handle;
    struct hapt_library outcome; /* for hapt doctor */
};

static struct {
    pthread_mutex_t lock;
    int count, toolkit; /* toolkit: major version that the plug-in was linked with */
    struct found found[LIBRARIES];
} libraries = {.lock = PTHREAD_MUTEX_INITIALIZER, .toolkit = 13};

bool cuda_library_is_complete(const char *path)
{
    Elf64_Ehdr header;
    struct stat about;
    FILE *file = fopen(path, "rb");
    const bool read = file && fread(&header, sizeof header, 1, file) == 1 && fstat(fileno(file), &about) == 0;
    if (file) fclose(file);
    if (!read || memcmp(header.e_ident, ELFMAG, SELFMAG) != 0) return false;
    return header.e_shoff <= (uint64_t)about.st_size &&
           (uint64_t)about.st_size - header.e_shoff >= (uint64_t)header.e_shnum * header.e_shentsize;
}

/* ---- folders ---- */

/* The first complete library of that name in the folders that match; path [PATH_MAX]. */
static bool in_folders(const char *folders, const char *soname, char *path)
{
    char pattern[PATH_MAX];
    glob_t all;
    bool found = false;
    if (snprintf(pattern, sizeof pattern, "%s/%s", folders, soname) >= (int)sizeof pattern ||
        glob(pattern, 0, NULL, &all) != 0)
        return false;
    for (size_t i = 0; i < all.gl_pathc && !found; i++) {
        found = strlen(all.gl_pathv[i]) < PATH_MAX && cuda_library_is_complete(all.gl_pathv[i]);
        if (found) strcpy(path, all.gl_pathv[i]);
    }
    globfree(&all);
    return found;
}

/* Searches a colon-separated list of folders, each followed by `below`. */
static bool in_list(const char *list, const char *below, const char *soname, char *path)
{
    for (const char *at = list; at && *at;) {
        const char *end = strchrnul(at, ':');
        char folder[PATH_MAX];
        if (end > at && snprintf(folder, sizeof folder, "%.*s%s", (int)(end - at), at, below) < (int)sizeof folder &&
            in_folders(folder, soname, path))
            return true;
        at = *end ? end + 1 : end;
    }
    return false;
}

static bool in_toolkit(const char *home, const char *soname, char *path)
{
    return in_list(home, "/lib64", soname, path) || in_list(home, "/lib", soname, path) ||
           in_list(home, "/targets/*/lib", soname, path);
}

/* Searches the packages of a Python installed in `prefix`; pyenv keeps several below one. */
static bool in_prefix(const char *prefix, const char *soname, char *path)
{
    static const char *const packages[] = {
        "/lib/python3*/site-packages/nvidia/*/lib", "/lib64/python3*/site-packages/nvidia/*/lib",
        "/lib/python3*/dist-packages/nvidia/*/lib", "/local/lib/python3*/dist-packages/nvidia/*/lib",
        "/versions/*/lib/python3*/site-packages/nvidia/*/lib"};
    for (size_t i = 0; prefix && *prefix && i < sizeof packages / sizeof *packages; i++)
        if (in_list(prefix, packages[i], soname, path)) return true;
    return false;
}

/* Searches the folders of an interpreter, PREFIX/bin/python3. In virtual environments, and maybe on the PATH, it is a
 * link: every link on the way is followed. */
static bool in_python(const char *program, const char *soname, char *path)
{
    char at[PATH_MAX], prefix[PATH_MAX], to[PATH_MAX];
    if (snprintf(at, sizeof at, "%s", program) >= (int)sizeof at) return false;
    for (int link = 0; link < LINKS; link++) {
        char *slash = strrchr(at, '/');
        if (!slash) return false;
        if (snprintf(prefix, sizeof prefix, "%.*s/..", (int)(slash - at), at) >= (int)sizeof prefix) return false;
        if (in_prefix(prefix, soname, path)) return true;
        const ssize_t length = readlink(at, to, sizeof to - 1);
        if (length <= 0) return false;
        to[length] = '\0';
        if (to[0] == '/')
            strcpy(at, to);
        else if (snprintf(slash + 1, sizeof at - (size_t)(slash + 1 - at), "%s", to) >=
                 (int)(sizeof at - (size_t)(slash + 1 - at)))
            return false;
    }
    return false;
}

static bool in_path(const char *soname, char *path)
{
    for (const char *at = getenv("PATH"); at && *at;) {
        const char *end = strchrnul(at, ':');
        char program[PATH_MAX];
        if (end > at && snprintf(program, sizeof program, "%.*s/python3", (int)(end - at), at) < (int)sizeof program &&
            access(program, X_OK) == 0 && in_python(program, soname, path))
            return true;
        at = *end ? end + 1 : end;
    }
    return false;
}

static bool search_folders(const char *soname, char *path)
{
    const char *home = getenv("HOME"), *python = getenv("HAPT_PYTHON");
    char own[PATH_MAX];
    if (in_list(getenv("HAPT_CUDA_LIBRARIES"), "", soname, path)) return true;
    if (in_toolkit(getenv("CUDA_HOME"), soname, path) || in_toolkit(getenv("CUDA_PATH"), soname, path)) return true;
    if (in_toolkit("/usr/local/cuda:/usr/local/cuda-*:/opt/cuda", soname, path)) return true;
    if (strncmp(soname, "libcuda.", 8) == 0 &&
        in_list("/usr/local/nvidia/lib64:/usr/lib/wsl/lib:/run/opengl-driver/lib", "", soname, path))
        return true;
    if (python && in_python(python, soname, path)) return true;
    if (in_prefix(getenv("VIRTUAL_ENV"), soname, path) || in_prefix(getenv("CONDA_PREFIX"), soname, path)) return true;
    if (in_list(getenv("CONDA_PREFIX"), "/lib", soname, path)) return true;
    if (in_path(soname, path) || in_list(getenv("PYTHONPATH"), "/nvidia/*/lib", soname, path)) return true;
    return home && snprintf(own, sizeof own, "%s/.local", home) < (int)sizeof own && in_prefix(own, soname, path);
}

/* ---- libraries ---- */

static const struct kind {
    const char *begin, *package, *without; /* package: Python package; NULL: none */
    bool needed;
} kinds[] = {{"libcublas", "nvidia-cublas", "without it there is no device", true},
             {"libcudnn", "nvidia-cudnn", "own attention kernels run, and convolutions become matrix products", false},
             {"libnccl", "nvidia-nccl", "ranks exchange through the host", false},
             {"libcuda.", NULL, "it belongs to the driver; without it there is no device", true},
             {"", NULL, "the plug-in needs it", true}};

static const struct kind *kind_of(const char *soname)
{
    const struct kind *kind = kinds;
    while (strncmp(soname, kind->begin, strlen(kind->begin)) != 0) kind++;
    return kind;
}

static void missing(struct found *found, const char *why)
{
    const struct kind *kind = kind_of(found->soname);
    char version[16] = "";
    if (why)
        snprintf(found->error, sizeof found->error, "%s (%s)", why, kind->without);
    else
        snprintf(found->error, sizeof found->error,
                 "%s is found neither by the loader nor in a CUDA toolkit or Python's nvidia/*/lib (%s)", found->soname,
                 kind->without);
    /* Python packages of cuBLAS for CUDA 13 have no version suffix. */
    if (kind != kinds || libraries.toolkit < 13) snprintf(version, sizeof version, "-cu%d", libraries.toolkit);
    if (kind->package)
        snprintf(found->hint, sizeof found->hint,
                 "python3 -m pip install %s%s, or name the folder that has it in HAPT_CUDA_LIBRARIES", kind->package,
                 version);
    else
        snprintf(found->hint, sizeof found->hint, "install it, or name the folder that has it in HAPT_CUDA_LIBRARIES%s",
                 strcmp(kind->begin, "libcuda.") == 0 ? "; in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility"
                                                      : "");
    found->outcome = (struct hapt_library){
        .name = found->soname, .missing_reason = found->error, .hint = found->hint, .needed = kind->needed};
}

static void came_from(struct found *found, const char *path)
{
    if (path != found->path) snprintf(found->path, sizeof found->path, "%s", path);
    found->outcome = (struct hapt_library){.name = found->soname, .path = found->path};
}

/* Call with the lock held. NULL: the table is full. */
static struct found *entry(const char *soname)
{
    for (int i = 0; i < libraries.count; i++)
        if (strcmp(libraries.found[i].soname, soname) == 0) return &libraries.found[i];
    if (libraries.count == LIBRARIES) return NULL;
    struct found *made = &libraries.found[libraries.count];
    memset(made, 0, sizeof *made);
    snprintf(made->soname, sizeof made->soname, "%s", soname);
    return made;
}

/* Searches the folders for a library that the loader did not find. */
static void open_in_folders(struct found *found)
{
    if (!search_folders(found->soname, found->path)) {
        missing(found, NULL);
        return;
    }
    found->handle = dlopen(found->path, RTLD_NOW | RTLD_LOCAL);
    if (found->handle)
        came_from(found, found->path);
    else
        missing(found, dlerror());
}

void *cuda_library_open(const char *soname, const char **error)
{
    pthread_mutex_lock(&libraries.lock);
    struct found *found = entry(soname);
    if (found && found == &libraries.found[libraries.count]) {
        struct link_map *map;
        libraries.count++;
        found->handle = dlopen(soname, RTLD_NOW | RTLD_LOCAL);
        if (!found->handle)
            open_in_folders(found);
        else
            came_from(found, dlinfo(found->handle, RTLD_DI_LINKMAP, &map) == 0 ? map->l_name : soname);
    }
    pthread_mutex_unlock(&libraries.lock);
    *error = !found ? "there are too many libraries" : found->handle ? NULL : found->error;
    return found ? found->handle : NULL;
}

/* The loader's error for a library that it did not find begins with its name: "libcublasLt.so.13: cannot open ...". */
static bool names_missing(const char *error, const char *plugin, char soname[NAME_CHARS])
{
    const size_t length = strcspn(error, ":");
    if (length == 0 || length >= NAME_CHARS || memchr(error, '/', length) || strncmp(error, plugin, length) == 0)
        return false;
    memcpy(soname, error, length);
    soname[length] = '\0';
    return strstr(soname, ".so") != NULL;
}

static void note_toolkit(const char *soname)
{
    const char *version = strstr(soname, ".so.");
    if (version && strncmp(soname, "libcublasLt", 11) == 0) libraries.toolkit = atoi(version + 4);
}

/* Records the libraries that the loader found for the plug-in. */
static int note_loaded(struct dl_phdr_info *info, size_t size, void *context)
{
    const char *slash = strrchr(info->dlpi_name, '/'), *name = slash ? slash + 1 : info->dlpi_name;
    (void)size, (void)context;
    if (strncmp(name, "libcublasLt.so", 14) != 0 || strlen(name) >= NAME_CHARS) return 0;
    struct found *found = entry(name);
    if (!found || found != &libraries.found[libraries.count]) return 0;
    libraries.count++;
    note_toolkit(name);
    came_from(found, info->dlpi_name);
    return 0;
}

void *cuda_libraries_open_plugin(const char *path, const char **error)
{
    char soname[NAME_CHARS];
    void *plugin = NULL;
    *error = NULL;
    pthread_mutex_lock(&libraries.lock);
    for (int tries = 0; !plugin && !*error && tries <= LIBRARIES; tries++) {
        plugin = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (plugin) break;
        static char text[ERROR_CHARS];
        const char *words = dlerror();
        snprintf(text, sizeof text, "%s", words ? words : "it cannot be loaded");
        *error = text;
        struct found *found = names_missing(text, path, soname) ? entry(soname) : NULL;
        if (!found || found != &libraries.found[libraries.count])
            break; /* the loader refuses the plug-in for another reason */
        libraries.count++;
        note_toolkit(soname);
        open_in_folders(found); /* then the loader takes the library that is already loaded under this name */
        *error = found->handle ? NULL : found->error;
    }
    if (plugin) dl_iterate_phdr(note_loaded, NULL);
    pthread_mutex_unlock(&libraries.lock);
    return plugin;
}

const struct hapt_library *cuda_library_at(int index)
{
    return index >= 0 && index < libraries.count ? &libraries.found[index].outcome : NULL;
}
