#!/usr/bin/env bash
# Several nodes with torchrun; run it on each node.
#
#   NODES=2 FIRST_NODE=node-0 bash nodes_torchrun.sh contrastive --config m3bert_stage3 \
#       --model_name_or_path runs/stage2 --train_files pairs-*.jsonl.gz --output_dir runs/stage3
#
# NODES is the number of nodes, FIRST_NODE the name or address of one of them, which all can reach. GPUS is the number
# of GPUs of a node, 8 by default, and PORT a free port of the first node, 29500 by default.
set -euo pipefail

exec torchrun --nnodes "${NODES:?}" --nproc_per_node "${GPUS:-8}" --rdzv_id m3bert --rdzv_backend c10d \
    --rdzv_endpoint "${FIRST_NODE:?}:${PORT:-29500}" -m m3bert train "$@"
