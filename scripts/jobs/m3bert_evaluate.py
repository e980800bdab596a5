# /// script
# requires-python = ">=3.11"
# dependencies = ["m3bert[evaluation,publish]"]
#
# [tool.hf-jobs]
# flavor = "t4-small"
# timeout = "4h"
# secrets = ["HF_TOKEN"]
# ///
"""
Score every size of an encoder on a machine of the Hub:

    hf jobs uv run --volume hf://buckets/user/runs:/runs scripts/jobs/m3bert_evaluate.py \\
        --model_name_or_path user/model --tasks sts --output_dir /runs/evaluation

See docs/jobs.md. The options are those of `m3bert evaluate`.
"""

import sys

from m3bert.cli import main


if __name__ == "__main__":
    main(["evaluate", *sys.argv[1:]])
