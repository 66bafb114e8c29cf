#!/usr/bin/env bash
# A vision transformer learns ten kinds of stripes, with a validation loss on images that it never trains on.
set -eu
cd "$(dirname "$0")"
hapt=$(realpath "${HAPT:-../../build/hapt}")
rm -rf out && mkdir out
python3 images.py out/train.bin 2000 1
python3 images.py out/held-out.bin 200 2

"$hapt" data out/train.bin --type cifar10 --output out/images.h5
"$hapt" data out/held-out.bin --type cifar10 --output out/held-out.h5
"$hapt" model vit --image 32 --patch 8 --layers 2 --hidden 64 --heads 4 --classes 10 --microbatch-rows 8 --data out/images.h5 --output out/model.h5
../../jobs/local.sh -np 2 "$hapt" --input out/model.h5 --threads 1 --predict --microbatches 4 --steps 60 --learning-rate 2e-3 \
    --validation-data out/held-out.h5 --validate-every 30 --output out/run
../../jobs/local.sh -np 2 "$hapt" evaluate --input out/model.h5 --checkpoint out/run --threads 1 --data out/held-out.h5
