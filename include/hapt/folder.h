/*
 * Folders whose names hapt chooses itself: made, emptied and renamed without ever following a symbolic link, so that a
 * link planted under such a name harms nothing outside. The path that a user gives (an output folder) may lead over
 * links: that is the user's choice.
 */
#ifndef HAPT_FOLDER_H
#define HAPT_FOLDER_H

#include <stdbool.h>
#include <stddef.h>

#include "hapt/status.h"

/* Makes the folder and all above it; each new entry is synced. HAPT_ERR_IO. */
enum hapt_status hapt_folder_make(const char *path);
/* The entries of the folder are on the disk. HAPT_ERR_IO. */
enum hapt_status hapt_folder_sync(const char *path);

/* Calls `visit` with the name of each entry but . and .. until it returns false. A folder that is not there has none;
 * `path` must not be a symbolic link itself. HAPT_ERR_IO where the folder cannot be read, HAPT_ERR_MEMORY. */
typedef bool hapt_folder_visitor(void *context, const char *name);
enum hapt_status hapt_folder_list(const char *path, hapt_folder_visitor *visit, void *context);

/* Is there a real folder of that name, no link? */
bool hapt_folder_is(const char *path);
/* Removes the folder `name` inside `parent` and the plain files in it whose names `ours` accepts. Anything else in it
 * stays, and then the folder stays. A symbolic link of that name is removed itself, its target is untouched. True when
 * nothing of that name is left. */
bool hapt_folder_remove(const char *parent, const char *name, bool (*ours)(const char *name));
/* Renames `name` inside `parent` to name.WHY, or name.WHY-2, ... if that exists. `now` receives the new name, "" where
 * it failed. */
bool hapt_folder_set_aside(const char *parent, const char *name, const char *why, char *now, size_t size);
/* Creates and removes a file in the folder. HAPT_ERR_IO with the reason. */
enum hapt_status hapt_folder_try(const char *path);

#endif
