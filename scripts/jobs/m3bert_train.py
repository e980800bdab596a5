# /// script
# requires-python = ">=3.11"
# dependencies = ["m3bert[publish,sentence-transformers]"]
#
# [tool.hf-jobs]
# flavor = "a10g-small"
# timeout = "4h"
# secrets = ["HF_TOKEN"]
# ///
"""
Train an encoder on a machine of the Hub, and publish it from there:

    hf jobs uv run scripts/jobs/m3bert_train.py contrastive --model_name_or_path BAAI/bge-small-en-v1.5 \\
        --train_files pairs.jsonl --output_dir model --push_to_hub true --hub_model_id user/model

See docs/jobs.md. The options are those of `m3bert train`.
"""

import sys

from m3bert.cli import main


if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
