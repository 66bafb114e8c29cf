/* Index signatures: the parsed form, and the sizes of their letters in one operator. Private to the model room. */
#ifndef HAPT_MODEL_SIGNATURE_H
#define HAPT_MODEL_SIGNATURE_H

#include "hapt/ops.h"

/* Parses "bti,io,o?->bto". False: the text is not a signature. */
bool hapt_signature_parse(const char *text, struct hapt_signature *signature);

/* Sizes of the letters a..z; 0: unknown. */
struct hapt_letter_sizes {
    int64_t size[26];
};

static inline int64_t hapt_letter_size(const struct hapt_letter_sizes *sizes, char letter)
{
    return sizes->size[letter - 'a'];
}

/* Gets the letter sizes from the operator's inputs, and with `with_outputs` from its outputs. Checks that required
 * operands are present and that dimensions, sizes and element types agree. *compute is the type of its 'c' operands.
 * HAPT_ERR_INPUT names operator and tensor. */
enum hapt_status hapt_signature_bind(const struct hapt_graph *graph, const struct hapt_op *op, bool with_outputs,
                                     struct hapt_letter_sizes *sizes, enum hapt_dtype *compute);

#endif
