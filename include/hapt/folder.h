/*
 * Folders whose names hapt chooses itself. They are created, emptied and renamed without following symbolic links, so
 * a link planted under such a name harms nothing outside. The path that a user gives (an output folder) may contain
 * links: that is the user's choice.
 */
#ifndef HAPT_FOLDER_H
#define HAPT_FOLDER_H

#include <stdbool.h>
#include <stddef.h>

#include "hapt/status.h"

/* Creates the folder and its parents; syncs each new entry. HAPT_ERR_IO. */
enum hapt_status hapt_folder_make(const char *path);
/* Syncs the folder's entries to disk. HAPT_ERR_IO. */
enum hapt_status hapt_folder_sync(const char *path);

/* Calls `visit` with the name of each entry except . and .. until it returns false. A missing folder has no entries;
 * `path` itself must not be a symbolic link. HAPT_ERR_IO if the folder cannot be read, HAPT_ERR_MEMORY. */
typedef bool hapt_folder_visitor(void *context, const char *name);
enum hapt_status hapt_folder_list(const char *path, hapt_folder_visitor *visit, void *context);

/* True for a real folder, false for a link. */
bool hapt_folder_is(const char *path);
/* Removes the folder `name` inside `parent`, with the regular files in it whose names `ours` accepts. If it holds
 * anything else, that and the folder stay. A symbolic link of that name is removed, its target is untouched. True if
 * nothing of that name is left. */
bool hapt_folder_remove(const char *parent, const char *name, bool (*ours)(const char *name));
/* Renames `name` inside `parent` to name.WHY, or to name.WHY-2, ... if that exists. `now` receives the new name; ""
 * after a failure. */
bool hapt_folder_rename_with_suffix(const char *parent, const char *name, const char *why, char *now, size_t size);
/* Tests write access: creates and removes a file in the folder. HAPT_ERR_IO with the reason. */
enum hapt_status hapt_folder_try(const char *path);
/* Removes what a process left that died while it tried the folder. */
void hapt_folder_drop_tries(const char *path);

#endif
