#!/usr/bin/env bash
# Several nodes under SLURM, which starts the job again, after its last checkpoint, if a node fails.
#
#   OUTPUT=runs/stage3 sbatch slurm.sh contrastive --config m3bert_stage3 \
#       --model_name_or_path runs/stage2 --train_files pairs-*.jsonl.gz
#
# OUTPUT is a folder that all nodes see. Set the numbers below, and the account and partition of your cluster.
#SBATCH --job-name m3bert
#SBATCH --nodes 2
#SBATCH --ntasks-per-node 1
#SBATCH --gpus-per-node 8
#SBATCH --cpus-per-task 64
#SBATCH --time 24:00:00
#SBATCH --requeue
#SBATCH --open-mode append
#SBATCH --output m3bert-%j.log
set -euo pipefail

first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
resume=false
if compgen -G "${OUTPUT:?}/checkpoint-*" > /dev/null; then
    resume=true
fi
exec srun --kill-on-bad-exit 1 torchrun --nnodes "$SLURM_NNODES" --nproc_per_node "$SLURM_GPUS_ON_NODE" \
    --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "$first_node:${PORT:-29500}" \
    -m m3bert train "$@" --output_dir "$OUTPUT" --resume_from_checkpoint "$resume"
