# /// script
# requires-python = ">=3.11"
# dependencies = ["m3bert"]
#
# [tool.hf-jobs]
# flavor = "t4-small"
# timeout = "4h"
# secrets = ["HF_TOKEN"]
# ///
"""
Embed texts into files on a machine of the Hub:

    hf jobs uv run --volume hf://buckets/user/runs:/runs scripts/jobs/m3bert_embed.py \\
        --model_name_or_path user/model --files corpus.jsonl --output_dir /runs/vectors

See docs/jobs.md. The options are those of `m3bert embed`.
"""

import sys

from m3bert.cli import main


if __name__ == "__main__":
    main(["embed", *sys.argv[1:]])
