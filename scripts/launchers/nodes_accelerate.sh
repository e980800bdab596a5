#!/usr/bin/env bash
# Several nodes with accelerate; run it on each node, beside nodes_accelerate.yaml.
#
#   NODE=0 FIRST_NODE=node-0 bash nodes_accelerate.sh contrastive --config m3bert_stage3 \
#       --model_name_or_path runs/stage2 --train_files pairs-*.jsonl.gz --output_dir runs/stage3
#
# The numbers of nodes and processes are in nodes_accelerate.yaml. NODE is the number of this node, from 0, FIRST_NODE
# the name or address of node 0, and PORT a free port of it, 29500 by default.
set -euo pipefail

exec accelerate launch --config_file "$(dirname "$0")/nodes_accelerate.yaml" --machine_rank "${NODE:?}" \
    --main_process_ip "${FIRST_NODE:?}" --main_process_port "${PORT:-29500}" -m m3bert train "$@"
