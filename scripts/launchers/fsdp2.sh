#!/usr/bin/env bash
# The GPUs of one node, with a share of the model on each (FSDP2).
#
#   GPUS=8 bash fsdp2.sh mipic --config mipic_qwen3 --model_name_or_path Qwen/Qwen3-Embedding-0.6B \
#       --train_files sentences.txt --output_dir runs/mipic
#
# GPUS is the number of GPUs, 8 by default. It excludes --mini_batch_size, whose cached gradients need whole weights.
set -euo pipefail

exec torchrun --standalone --nproc_per_node "${GPUS:-8}" -m m3bert train "$@" \
    --fully_shard true --activation_checkpointing true
