/*
 * Finds the shared CUDA libraries that the plug-in needs (cuBLASLt) or can use (cuDNN, NCCL), and remembers the file of
 * each.
 *
 * Order of search:
 *   the loader: RUNPATH, LD_LIBRARY_PATH, ldconfig
 *   the folders of HAPT_CUDA_LIBRARIES, separated by colons
 *   lib64 of CUDA_HOME and of the usual toolkits
 *   the folders nvidia/NAME/lib that pip creates among Python packages: HAPT_PYTHON, a virtual or conda environment,
 *   python3 on the PATH, PYTHONPATH, ~/.local
 */
#ifndef HAPT_DEVICE_CUDA_LIBRARIES_H
#define HAPT_DEVICE_CUDA_LIBRARIES_H

#include "hapt/device.h"

/* False for a truncated file, on which the loader would crash. */
bool cuda_library_is_complete(const char *path);

/* Opens the plug-in with the libraries it is linked to. NULL: *error says why; valid until the next call. */
void *cuda_libraries_open_plugin(const char *path, const char **error);

/* Opens a library by its soname; the same answer each time. NULL: *error says why; valid for ever. Thread safe. */
void *cuda_library_open(const char *soname, const char **error);

/* Libraries that were searched for, in that order; NULL past the end. */
const struct hapt_library *cuda_library_at(int index);

#endif
