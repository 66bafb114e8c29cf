/* Objects of a file by name: whether they exist, whether they are inside the file, and failures that name them. */
#include <stdio.h>
#include <string.h>

#include "h5_private.h"

enum hapt_status hapt_h5_fail(struct hapt_h5 *file, const char *what, const char *name)
{
    if (file->writing)
        return hapt_fail(HAPT_ERR_IO, "check free space and permissions", "cannot write %s%s%s to %s%s%s", what,
                         *name ? " " : "", name, file->path, file->error ? ": " : "",
                         file->error ? strerror(file->error) : "");
    return hapt_h5_fail_content(file, "the file is damaged or was not written by hapt", "cannot read %s%s%s of %s",
                                what, *name ? " " : "", name, file->path);
}

/* Target of a link. If HDF5 cannot answer because of the system, the error is kept and the file is not read further. */
enum link_target { NOWHERE, INSIDE, OUTSIDE };

static enum link_target no_answer(struct hapt_h5 *file)
{
    const int error = hapt_h5_system_error(file);
    if (error && !file->writing) file->error = error;
    return NOWHERE;
}

static enum link_target follow_link(struct hapt_h5 *file, const char *path)
{
    H5L_info_t about;
    const htri_t exists = H5Lexists(file->id, path, H5P_DEFAULT);
    if (exists == 0) return NOWHERE;
    if (exists < 0 || H5Lget_info(file->id, path, &about, H5P_DEFAULT) < 0) return no_answer(file);
    return about.type >= H5L_TYPE_UD_MIN ? OUTSIDE : INSIDE;
}

static enum link_target follow(struct hapt_h5 *file, const char *name)
{
    char prefix[1024];
    if (!strcmp(name, "/")) return INSIDE;
    if (snprintf(prefix, sizeof prefix, "%s", name) >= (int)sizeof prefix) return NOWHERE;
    for (char *slash = strchr(prefix + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        const enum link_target target = follow_link(file, prefix);
        *slash = '/';
        if (target != INSIDE) return target;
    }
    const enum link_target target = follow_link(file, prefix);
    if (target != INSIDE) return target;
    const htri_t there = H5Oexists_by_name(file->id, prefix, H5P_DEFAULT);
    return there > 0 ? INSIDE : there < 0 ? no_answer(file) : NOWHERE;
}

bool hapt_h5_exists(struct hapt_h5 *file, const char *name)
{
    H5_HOLD_LOCK;
    return follow(file, name) != NOWHERE;
}

bool hapt_h5_is_group(struct hapt_h5 *file, const char *name)
{
    H5_HOLD_LOCK;
    const hid_t id = follow(file, name) == INSIDE ? H5Gopen2(file->id, name, H5P_DEFAULT) : -1;
    if (id >= 0) H5Gclose(id);
    return id >= 0;
}

enum hapt_status hapt_h5_link(struct hapt_h5 *file, const char *object, const char *name)
{
    H5_HOLD_LOCK;
    const hid_t links = H5Pcreate(H5P_LINK_CREATE);
    H5Pset_create_intermediate_group(links, 1);
    const bool failed = H5Lcreate_hard(file->id, object, file->id, name, links, H5P_DEFAULT) < 0;
    H5Pclose(links);
    return failed ? hapt_h5_fail(file, "link", name) : HAPT_OK;
}

enum hapt_status hapt_h5_check_inside(struct hapt_h5 *file, const char *name)
{
    if (file->writing || follow(file, name) != OUTSIDE) return HAPT_OK;
    return hapt_h5_fail_content(file, "copy the data into the file (h5repack, h5copy)",
                                "%s of %s is behind a link to another file, which is not followed", name, file->path);
}

bool hapt_h5_is_outside(hid_t dataset)
{
    const hid_t made = H5Dget_create_plist(dataset);
    const bool outside = made < 0 || H5Pget_layout(made) == H5D_VIRTUAL || H5Pget_external_count(made) > 0;
    if (made >= 0) H5Pclose(made);
    return outside;
}
