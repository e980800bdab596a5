# /// script
# requires-python = ">=3.11"
# dependencies = ["m3bert[evaluation,publish,sentence-transformers]"]
#
# [tool.hf-jobs]
# flavor = "t4-small"
# timeout = "4h"
# secrets = ["HF_TOKEN"]
# ///
"""
Run a command of m3bert on a machine of the Hub:

    hf jobs uv run --flavor a10g-small scripts/jobs/m3bert_job.py train contrastive \\
        --model_name_or_path BAAI/bge-small-en-v1.5 --train_files pairs.jsonl --output_dir model \\
        --push_to_hub true --hub_model_id user/model
    hf jobs uv run --volume hf://buckets/user/runs:/runs scripts/jobs/m3bert_job.py embed \\
        --model_name_or_path user/model --files corpus.jsonl --output_dir /runs/vectors

See docs/scale.md.
"""

import sys

from m3bert.cli import main


if __name__ == "__main__":
    main(sys.argv[1:])
