"""How much a GPU is asked to do in a micro-step of the papers' recipes, counted on a CPU with the blocks of a GPU."""

import torch
import yaml
from transformers import BertConfig

from m3bert.commands.recipes import find_recipe
from m3bert.trainers import Grid, MIPICConfig, MultigranularMLM, NestedBatch, NestedStates
from m3bert.trainers.embedding import info_nce
from m3bert.trainers.m3bert_mlm import losses as masked_lm
from m3bert.trainers.mipic import losses as mipic
from m3bert.utils.numerics import blocks
from tests.conftest import quiet
from tests.trainers.kernels import Counts


def states_of(shape: tuple[int, ...], layers: list[int]) -> NestedStates:
    """Random hidden states of texts without padding."""
    states = {layer: torch.randn(*shape).requires_grad_() for layer in layers}
    return NestedStates(states, torch.ones(shape[:2], dtype=torch.long))


def test_the_masked_lm_head_of_stage_1(monkeypatch):
    """Its blocks of the vocabulary are as many as with all of its rows and words, which would take a minute."""
    grid, rows, words = Grid.parse("4,8,12x32,64,128,768"), round(64 * 512 * 0.15) * 3, 250_002
    number = len(blocks(words, masked_lm.default_block_size(torch.empty(rows, 0, device="meta"))))
    assert 10 < number < 40
    few, block = 8, 4
    monkeypatch.setattr(masked_lm, "default_block_size", lambda states: block)
    monkeypatch.setattr(masked_lm, "is_compiled", lambda states: True)
    monkeypatch.setattr(
        masked_lm, "compiled", lambda function: function
    )  # counts each operation that becomes one kernel
    head = torch.nn.Linear(768, number * block)
    texts, labels = states_of((1, 2 * few, 768), grid.layers), torch.full((1, 2 * few), -100)
    labels[0, ::2] = torch.randint(number * block, (few,))
    objective = MultigranularMLM(grid)
    with Counts() as counts, torch.autocast("cpu", dtype=torch.bfloat16):
        terms = objective(NestedBatch({"text": texts}, labels=labels, output_embeddings=head))
        objective.total(terms).backward()
    assert counts.kernels.total() <= 3000
    assert counts.waits.total() <= 5


def test_all_losses_of_mipic_for_bert(monkeypatch, tmp_path):
    monkeypatch.setattr(mipic, "CPU_GRAM_NUMBERS", mipic.GRAM_NUMBERS)
    monkeypatch.setitem(info_nce.TILE_SIZES, "cpu", info_nce.TILE_SIZES["cuda"])
    recipe = yaml.safe_load(find_recipe("mipic_bert").read_text(encoding="utf-8"))
    args = MIPICConfig(**quiet(tmp_path, **recipe))
    objective = args.build_objective(args.grid_for(BertConfig()))
    texts = {f"view {view}": states_of((16, 32, 768), objective.layers) for view in range(2)}
    ids = dict.fromkeys(texts, torch.arange(16))
    with Counts() as counts:
        objective.total(objective(NestedBatch(texts, text_ids=ids))).backward()
    assert counts.kernels.total() <= 2500
    assert counts.waits.total() <= 2  # the longest text of each column
