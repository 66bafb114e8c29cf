/*
 * Angles of rotary positions (Su et al. 2021), for all back ends: how far a pair of columns turns per position.
 *
 * Attributes of the operators "rope" and "rope_dx" (src/model/ops_llama.c):
 *   integer[0] heads
 *   integer[1] columns of a head that rotate, from the first on; 0: all
 *   integer[2] enum hapt_rope_scaling
 *   integer[3] YaRN: 1 keeps the fractions of the ramp's ends
 *   real[0] base
 *   real[1] factor by which the context is longer than the one of pre-training
 *   real[2], real[3] Llama 3: low and high frequency factor; YaRN: beta_slow, beta_fast. Turns within the original
 *           context: pairs with fewer than the first are stretched fully, those with more than the second not at all
 *   real[4] original context, positions
 *   real[5] factor of sines and cosines (YaRN's attention factor); 0: 1
 *
 * A source for another compiler defines HAPT_ROPE_FUNCTION first.
 */
#ifndef HAPT_ROPE_H
#define HAPT_ROPE_H

#include <math.h>
#include <stdint.h>

#ifndef HAPT_ROPE_FUNCTION
#define HAPT_ROPE_FUNCTION static inline
#endif

enum hapt_rope_scaling {
    HAPT_ROPE_PLAIN,
    HAPT_ROPE_LINEAR, /* all angles are divided by the factor (Chen et al. 2023) */
    HAPT_ROPE_LLAMA3, /* the more, the fewer turns a pair makes in the original context (Llama 3.1) */
    HAPT_ROPE_YARN,   /* likewise, with a ramp over the pairs (Peng et al. 2023, NTK by parts) */
    HAPT_ROPE_SCALINGS
};

/* Columns of a head that rotate, of `head` columns. */
HAPT_ROPE_FUNCTION int64_t hapt_rope_columns(const int64_t *integer, int64_t head)
{
    return integer[1] > 0 ? integer[1] : head;
}

/* The pair, not rounded, that makes `turns` turns in the original context. */
HAPT_ROPE_FUNCTION double hapt_rope_pair(const double *real, int64_t half, double turns)
{
    return (double)half * log(real[4] / (turns * 6.283185307179586)) / log(real[0]);
}

/* Radians per position of pair `i` of `half` pairs. */
HAPT_ROPE_FUNCTION double hapt_rope_rate(const int64_t *integer, const double *real, int64_t i, int64_t half)
{
    const double rate = pow(real[0], -(double)i / (double)half);
    if (integer[2] == HAPT_ROPE_LINEAR) return rate / real[1];
    double share = 0; /* of the rate that is kept; the rest is divided by the factor */
    if (integer[2] == HAPT_ROPE_LLAMA3) {
        const double turns = real[4] * rate / 6.283185307179586;
        share = (turns - real[2]) / (real[3] - real[2]);
    } else if (integer[2] == HAPT_ROPE_YARN) {
        const double last = (double)(2 * half - 1);
        double low = hapt_rope_pair(real, half, real[3]), high = hapt_rope_pair(real, half, real[2]);
        if (integer[3] == 0) low = floor(low), high = ceil(high);
        low = fmax(low, 0.0);
        high = fmin(high, last);
        share = 1 - ((double)i - low) / (high > low || high < low ? high - low : 0.001);
    } else {
        return rate;
    }
    share = fmin(1.0, fmax(0.0, share)); /* doubles: nvcc has no mixed ones */
    return rate * share + rate / real[1] * (1 - share);
}

/* Factor of sines and cosines. */
HAPT_ROPE_FUNCTION double hapt_rope_magnitude(const double *real)
{
    return real[5] > 0 ? real[5] : 1;
}

#endif
