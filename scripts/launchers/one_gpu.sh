#!/usr/bin/env bash
# One GPU.
#
#   bash one_gpu.sh contrastive --config msmarco_triplets --model_name_or_path intfloat/multilingual-e5-base \
#       --train_files triplets.jsonl --output_dir runs/msmarco
#
# The recipes of m3BERT's stages accumulate batches for eight GPUs: on one, eight times as many make the same step.
set -euo pipefail

exec m3bert train "$@"
