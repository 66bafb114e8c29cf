/* Index signatures: parsed form and the sizes their letters take in one operator. Private to the model room. */
#ifndef HAPT_MODEL_SIGNATURE_H
#define HAPT_MODEL_SIGNATURE_H

#include "hapt/ops.h"

/* Parses "bti,io,o?->bto". False when the text is no signature. */
bool hapt_signature_parse(const char *text, struct hapt_signature *signature);

/* Sizes of the letters a..z; 0: not known. */
struct hapt_letter_sizes {
    int64_t size[26];
};

static inline int64_t hapt_letter_size(const struct hapt_letter_sizes *sizes, char letter)
{
    return sizes->size[letter - 'a'];
}

/* Takes the sizes from the operator's inputs, and from its outputs when `with_outputs`, and checks that operands are
 * present where required and agree in dimensions, sizes and element types. *compute is the type of its 'c' operands.
 * HAPT_ERR_INPUT names operator and tensor. */
enum hapt_status hapt_signature_bind(const struct hapt_graph *graph, const struct hapt_op *op, bool with_outputs,
                                     struct hapt_letter_sizes *sizes, enum hapt_dtype *compute);

#endif
