"""
Depths in closed form: paths, which skip layers and end in the last ones; prefixes, each with one ridge regression from
its pooled hidden state to the embedding of the last layer; and a table with one row per token of the vocabulary.

Every depth of the encoder then embeds into the same space, without any training.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..modeling.modeling_elastic import make_elastic
from .install import install, without_depths
from .late import fit_late
from .plan import FitOptions, FitPlan, Sources
from .read_texts import read_texts
from .record import ExitFit
from .solve import solve


@torch.no_grad()
def fit_exits(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str] | Sources,
    options: FitOptions | None = None,
    **changes: Any,
) -> ExitFit:
    """
    Fit the depths of an encoder in closed form and put them into it; it becomes elastic. Earlier depths are replaced.
    Memory does not grow with the number of texts, and all ranks share the work.

    1. The texts are tokenised once, and the share p_t of each token t is counted.
    2. Each token of the vocabulary is encoded as a text of its own: s_t. With its input embedding e_t, both also
       weighted by a / (a + p_t), it has the features phi_t.
    3. The texts are encoded once.
    4. Depth 0: a ridge regression from the mean of phi over a text's tokens to its L2-normalised embedding at the
       last layer. It gives the static table T, one row per token: depth 0 of a text is the mean of its tokens' rows.
    5. Depth l: a ridge regression from [pooled hidden state of l, mean of T] to the same target; beside it, one from
       the hidden state alone, which a native export uses.
    6. Paths: for each depth in `depths`, several lists of layers are compared ([`m3bert.exits.choice`]). The layers
       before the gaps of the best ones are then refitted on the tokens of 3,000 texts ([`fit_paths`]). A path ends in
       the last layers, so it has no exit, unless the last layer has one, which is then the exit of the path, too.

    The penalty of each regression is the one that keeps most of the nearest ten texts, on at most 2,000 held-out
    texts; the final fit uses all texts. Predictions are scaled to the variances of the target
    ([`Regression.match_variances`]).

    An encoder for late interaction, with a vector per token, gets paths alone ([`fit_late`]).

    Args:
        model ([`~transformers.PreTrainedModel`]): The encoder, whole or with a head. It is changed in place.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Tokenizer of the model.
        texts (`Iterable[str]` or `Mapping[str, Iterable[str]]`): Unlabelled texts, or several sources of texts by
            name. Empty texts are skipped. Queries should be among them if the model is to embed queries.
        options ([`FitOptions`], *optional*): The options.
        changes (*optional*): Fields of the options by name, such as `layers=[2]`.

    Returns:
        [`ExitFit`]

    Raises:
        ValueError: if the encoder cannot skip layers, a depth is outside it, the tokenizer is not the model's or
            cannot give a static table, there are fewer texts than dims, a teacher has no embedding of a text, or one
            that is zero or not finite, the projection of a model that is no m3BERT would follow exits into a teacher's
            space, or a hidden state is not finite (the message names the layer and a text, or the token).
    """
    plan = FitPlan.of(model, tokenizer, replace(options or FitOptions(), **changes))
    tokenized = plan.tokenize(texts, tokenizer)
    target_fingerprint = plan.target_fingerprint(tokenized)
    make_elastic(model)
    with without_depths(model.base_model):
        if plan.settings.is_late:
            return fit_late(plan, model, tokenizer, tokenized)
        read = read_texts(plan, model, tokenizer, tokenized, target_fingerprint)
        return install(plan, read, solve(plan, read))
