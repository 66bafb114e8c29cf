/* SipHash-2-4 with a 128-bit tag, a message authentication code (J.-P. Aumasson, D. J. Bernstein: SipHash, a fast
 * short-input PRF, 2012). */
#ifndef HAPT_LINK_SIPHASH_H
#define HAPT_LINK_SIPHASH_H

#include <stdbool.h>
#include <stddef.h>

enum { SIPHASH_BYTES = 16 }; /* of the key and of the tag */

void siphash_tag(const unsigned char key[SIPHASH_BYTES], const void *data, size_t bytes,
                 unsigned char tag[SIPHASH_BYTES]);
/* Compares two tags in constant time. */
bool siphash_equal(const unsigned char a[SIPHASH_BYTES], const unsigned char b[SIPHASH_BYTES]);

#endif
