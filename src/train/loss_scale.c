/* The loss scale of training in fp16. */
#include "loss_scale.h"

#include <math.h>

enum { GOOD_STEPS = 2000 };
static const double largest_scale = 16777216;

void loss_scale_begin(struct loss_scale *scale, enum hapt_dtype dtype, double first, const double *norm, int64_t steps)
{
    *scale = (struct loss_scale){.dynamic = dtype == HAPT_F16, .value = dtype == HAPT_F16 ? first : 1};
    for (int64_t step = 0; step < steps; step++) loss_scale_note(scale, norm[step]);
}

bool loss_scale_overflows(const struct loss_scale *scale, double loss, double norm)
{
    return scale->dynamic && scale->value > 1 && isfinite(loss) && !isfinite(norm);
}

void loss_scale_note(struct loss_scale *scale, double norm)
{
    if (!scale->dynamic) return;
    if (!isfinite(norm)) {
        scale->value /= 2;
        scale->good = 0;
        scale->skipped++;
    } else if (++scale->good == GOOD_STEPS) {
        scale->value = fmin(2 * scale->value, largest_scale);
        scale->good = 0;
    }
}
