#!/usr/bin/env bash
# Plans for layers and devices that only their owner can measure: the profile is written by hand, with h5py.
set -eu
cd "$(dirname "$0")"
hapt=$(realpath "${HAPT:-../../build/hapt}")
rm -rf out && mkdir out
/usr/bin/python3 profile.py out/profile.h5
"$hapt" check out/profile.h5
"$hapt" plan --profile out/profile.h5 --microbatches 16 --output out/plan.h5
"$hapt" simulate --plan out/plan.h5 --schedule 1f1b
