/*
 * Finds the shared libraries of CUDA that the plug-in needs (cuBLASLt) or can use (cuDNN, NCCL), and remembers which
 * file each came from.
 *
 * The loader is asked first: RUNPATH, LD_LIBRARY_PATH, ldconfig. Then come the folders of HAPT_CUDA_LIBRARIES
 * (separated by colons), lib64 of CUDA_HOME and of the usual toolkits, and the folders nvidia/NAME/lib that pip makes
 * among the packages of Python (HAPT_PYTHON, a virtual or conda environment, python3 on the PATH, PYTHONPATH,
 * ~/.local).
 */
#ifndef HAPT_DEVICE_CUDA_LIBRARIES_H
#define HAPT_DEVICE_CUDA_LIBRARIES_H

#include "hapt/device.h"

/* False for a file that was cut off: the loader dies of such a library. */
bool cuda_library_is_whole(const char *path);

/* Opens the plug-in with the libraries it is linked to. NULL: *said tells why, good until the next call. */
void *cuda_libraries_open_plugin(const char *path, const char **said);

/* Opens a library by its soname; the same answer each time. NULL: *said tells why, good for ever. Any thread may call
 * it. */
void *cuda_library_open(const char *soname, const char **said);

/* The libraries that were looked for, in that order; NULL past the end. */
const struct hapt_library *cuda_library_at(int index);

#endif
