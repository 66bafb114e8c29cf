/* Private to src/picture: parts of the pages of a plan and of a run. */
#ifndef HAPT_PICTURE_PAGE_H
#define HAPT_PICTURE_PAGE_H

#include "hapt/picture.h"
#include "timeline.h"
#include "topology_draw.h"

/* Writes the body of a page about `picture`. */
typedef enum hapt_status picture_page_body(struct hapt_svg *svg, const void *picture, struct hapt_arena *arena);
/* The file of a page. HAPT_ERR_IO, HAPT_ERR_MEMORY, and failures of the body. */
enum hapt_status picture_page_save(picture_page_body *body, const void *picture, const char *path);

void picture_page_open(struct hapt_svg *svg, const char *title);
/* One row of the list at the head. */
void picture_page_fact(struct hapt_svg *svg, const char *name, const char *value);
/* Devices, date and version; closes the list. */
void picture_page_facts(struct hapt_svg *svg, const struct hapt_cluster *cluster);
void picture_page_close(struct hapt_svg *svg);

/* The section of the timelines of one step; measured NULL: the predicted one alone. */
enum hapt_status picture_section_timeline(struct hapt_svg *svg, const struct hapt_plan *plan,
                                          const struct hapt_report_trace *trace, struct hapt_arena *arena);
/* measured [plan->stage_count], NULL: unknown. */
enum hapt_status picture_section_memory(struct hapt_svg *svg, const struct hapt_plan *plan,
                                        const struct hapt_report_stage *measured, struct hapt_arena *arena);
enum hapt_status picture_section_cluster(struct hapt_svg *svg, const struct hapt_plan *plan,
                                         const struct hapt_cluster *cluster, struct hapt_arena *arena);
/* The plan as sentences, a paragraph for each stage. */
void picture_section_words(struct hapt_svg *svg, const struct hapt_plan *plan);

#endif
