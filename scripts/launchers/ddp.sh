#!/usr/bin/env bash
# The GPUs of one node, with the whole model on each (DDP).
#
#   GPUS=8 bash ddp.sh multigranular-mlm --config m3bert_stage1 --prepared_data runs/english \
#       --tokenizer_name intfloat/multilingual-e5-base --output_dir runs/stage1
#
# GPUS is the number of GPUs, 8 by default.
set -euo pipefail

exec torchrun --standalone --nproc_per_node "${GPUS:-8}" -m m3bert train "$@"
