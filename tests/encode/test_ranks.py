"""Two processes are one big batch: embeddings' and parameters' gradients, with hard negatives, for every objective."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from torch import distributed
from torch.distributed import HashStore

from m3bert import trainers
from m3bert.encode import ranks
from m3bert.encode.states import PooledStates
from m3bert.modeling import M3BertModel, M3BertQuantizer, M3BertQuantizerConfig
from m3bert.trainers.exit_distillation.cross_depth import CrossDepth
from tests.conftest import quiet
from tests.trainers.tiny_run import PLAIN_STEP, assert_same_weights, quiet_model, run_two


ROWS = 16
OF_RANK = (slice(0, 11), slice(11, None))  # the rows of each of two processes
BANK = torch.randn(20, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def qama(grid: str, width: int, **changes) -> trainers.QAMA:
    """Of a quantizer whose parameters all matter."""
    grid = trainers.Grid.parse(grid)
    quantizer = M3BertQuantizer(M3BertQuantizerConfig(hidden_size=width, dims=grid.dims, momentum=0.5))
    for parameter in quantizer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    quantizer.calibrate(torch.randn(60, width))
    return trainers.QAMA(grid, quantizer=quantizer, codes=("qama-2", "qama-hybrid"), rank_texts=3 * ROWS, **changes)


OBJECTIVES = {
    "contrastive": lambda: trainers.Contrastive(trainers.Grid.parse("2,3x4,8")),
    "symmetric": lambda: trainers.Contrastive(trainers.Grid.parse("2,3x4,8"), symmetric=True, reduction="mean"),
    "ring": lambda: trainers.Contrastive(
        trainers.Grid.parse("2,3x4,8"), ring=True, symmetric=True, learn_temperature=True
    ),
    "own negatives": lambda: trainers.Contrastive(trainers.Grid.parse("2,3x4,8"), own_negatives=True, symmetric=True),
    "temperature": lambda: trainers.Contrastive(
        trainers.Grid.parse("2,3x4,8"), learn_temperature=True, mask_duplicates=False
    ),
    "espresso": lambda: trainers.Espresso(trainers.Grid.parse("2,3x4,8")),
    "2dmse": lambda: trainers.Matryoshka2d(trainers.Grid.parse("1,2,3x2,4,8")),
    "starbucks": lambda: trainers.Starbucks(trainers.Grid.parse("1x2,2x4,3x8")),
    "sia": lambda: trainers.SIA(trainers.Grid.parse("2,3x2,4,8"), temperature=1.0, smallest_token_count=2),
    "pic": lambda: trainers.PIC(trainers.Grid.parse("1x2,2x4,3x8")),
    "scr": lambda: trainers.SCR(trainers.Grid.parse("2,3x2,4,8"), threshold=0.05),
    "sir": lambda: trainers.SIR(trainers.Grid.parse("2,3x4,8")),
    "hsic": lambda: trainers.HSIC(trainers.Grid.parse("2,3x4,8"), gamma=0.1, input_layer=1),
    "teacher": lambda: trainers.TeacherContrast(trainers.Grid.parse("2,3x4,8"), teacher_dim=6),
    "mse": lambda: trainers.TeacherMSE(trainers.Grid.parse("3x4,8"), teacher_dim=6),
    "similarity": lambda: trainers.TeacherSpace(
        trainers.Grid.parse("2,3x4,6"), bank=BANK, candidates=5, alignment=0.5
    ),
    "teacher space": lambda: trainers.TeacherSpace(
        trainers.Grid.parse("2,3x4,6"), bank=BANK, candidates=5, loss="contrastive"
    ),
    "cross depth": lambda: CrossDepth(trainers.Grid.parse("1,3x4,8")),
    "cosent": lambda: trainers.ScoredPairs(trainers.Grid.parse("2,3x4,8")),
    "scores of a reranker": lambda: trainers.ScoredPairs(trainers.Grid.parse("2,3x4,8"), loss="kl"),
    "crd": lambda: trainers.CRD(trainers.Grid.parse("3x4,8"), teacher_dim=6, critic_dim=5),
    "qama": lambda: qama("3x2,6", 6, quantized_gradient=True),
    "qama, end to end": lambda: qama(
        "2,3x4,8", 8, frozen=False, weights={"contrast": 1.0, "variance": 1.0}, quantized_gradient=True
    ),
    "composition": lambda: trainers.Composition(
        {
            "mrl": (0.4, trainers.Contrastive(trainers.Grid.parse("3x2,4,8"))),
            "sia": (0.6, trainers.SIA(trainers.Grid.parse("1,3x2,4,8"))),
            "sir": (0.2, trainers.SIR(trainers.Grid.parse("2x4,8"))),
        }
    ),
}

# Objectives that see nothing of other ranks.
OWN_BATCH = {
    "own batch": lambda: trainers.Contrastive(
        trainers.Grid.parse("2,3x4,8"), gather_negatives=False, ring=True, symmetric=True
    ),
    "own batch, 2dmse": lambda: trainers.Matryoshka2d(trainers.Grid.parse("2,3x4,8"), gather_negatives=False),
    "own batch, pic": lambda: trainers.PIC(trainers.Grid.parse("1x2,2x4,3x8"), gather_negatives=False),
}


def embedding_gradients(objective: trainers.Objective, rows: slice, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Loss, terms, and gradients of embeddings, or of token states where the objective reads those, and of its own
    parameters, for some rows of one batch."""
    generator = torch.Generator().manual_seed(7)
    names, layers = ("anchor", "positive", "negative"), (1, 2, 3)
    shape = (ROWS, 8) if objective.pooling else (ROWS, 5, 8)
    leaves = {
        (name, layer): torch.randn(shape, dtype=torch.float64, generator=generator)[rows].to(device).requires_grad_()
        for name in names
        for layer in layers
    }
    # Every text occurs several times, on both ranks.
    ids = {name: torch.randint(6, (ROWS,), generator=generator)[rows].to(device) for name in names}
    lengths = torch.randint(1, 6, (ROWS, 1), generator=generator)[rows]
    mask = (torch.arange(5) < lengths).long().to(device)
    states = {name: {layer: leaves[name, layer] for layer in layers} for name in names}
    texts = {
        name: PooledStates(column, objective.pooling) if objective.pooling else trainers.NestedStates(column, mask)
        for name, column in states.items()
    }
    width = getattr(objective, "teacher_dim", 6)
    drawn = {name: torch.randn(ROWS, width, dtype=torch.float64, generator=generator)[rows] for name in names}
    teacher = {name: embeddings.to(device) for name, embeddings in drawn.items()}
    scores = torch.randn(ROWS, 2, dtype=torch.float64, generator=generator)[rows].to(device)
    labels = scores if getattr(objective, "loss", "") == "kl" else scores[:, 0]
    batch = trainers.NestedBatch(texts=texts, text_ids=ids, teacher=teacher, labels=labels)
    terms = objective.double().to(device).train()(batch)
    loss = objective.total(terms)
    loss.backward()
    outcome = {f"{name} {layer}": leaf.grad for (name, layer), leaf in leaves.items() if leaf.grad is not None}
    outcome |= {f"parameter {name}": parameter.grad for name, parameter in objective.named_parameters()}
    outcome |= {f"parameter {name}": buffer.double() for name, buffer in objective.named_buffers()}
    return outcome | {f"term {name}": term.detach() for name, term in terms.items()} | {"term": loss.detach()}


EMBEDDINGS_OF_TWO = """
from tests.encode.test_ranks import OBJECTIVES, OF_RANK, OWN_BATCH, embedding_gradients
rank = torch.distributed.get_rank()
for name, make in (OBJECTIVES | OWN_BATCH).items():
    torch.manual_seed(0)  # the parameters are the same, as data parallelism sees to
    objective = make()
    torch.manual_seed(rank)  # draws that differ, unless the objective makes them agree
    torch.save(embedding_gradients(objective, OF_RANK[rank]), Path(sys.argv[1]) / f"{name}-{rank}.pt")
"""


@pytest.fixture(scope="module")
def of_two(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    run_two(folder, TRAIN_TWO + EMBEDDINGS_OF_TWO)
    return folder


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_gradients_of_embeddings_are_those_of_the_big_batch(of_two, name):
    torch.manual_seed(0)
    expected = embedding_gradients(OBJECTIVES[name](), slice(None))
    first, second = (torch.load(of_two / f"{name}-{rank}.pt") for rank in (0, 1))
    assert first.keys() == second.keys() == expected.keys()
    for key, value in expected.items():
        if key.startswith(("term", "parameter")):
            actual = (first[key] + second[key]) / 2
        else:
            actual = torch.cat([first[key], second[key]]) / 2  # data parallelism averages over ranks
        # ESE's decomposition of a squared matrix magnifies the rounding of sums.
        torch.testing.assert_close(actual, value, atol=1e-9, rtol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


@pytest.fixture
def nccl(monkeypatch) -> Iterator[None]:
    """A group of NCCL with this process alone, which counts as one of two ranks."""
    distributed.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(ranks, "world_size", lambda: 2)
    yield
    distributed.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tensors_of_any_device_go_through_nccl(device):
    tensor = torch.randn(3, device=device, dtype=torch.float64, requires_grad=True)
    total = ranks.sum_over_ranks(tensor)
    assert total.device == ranks.same_on_all_ranks(tensor).device == tensor.device
    assert torch.equal(total, tensor) and torch.equal(ranks.same_on_all_ranks(tensor), tensor)
    (total @ torch.arange(3.0, dtype=torch.float64, device=device)).backward()
    assert tensor.grad.tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", list(OWN_BATCH))
def test_without_gathered_negatives_each_rank_has_the_loss_of_its_own_batch(of_two, name):
    """The step is then the mean of two separate ones, which is not that of the big batch."""
    losses = []
    for rank, rows in enumerate(OF_RANK):
        torch.manual_seed(0)
        expected = embedding_gradients(OWN_BATCH[name](), rows)
        outcome = torch.load(of_two / f"{name}-{rank}.pt")
        assert outcome.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(outcome[key], value, atol=1e-9, rtol=1e-6)
        losses.append(expected["term"])
    torch.manual_seed(0)
    assert embedding_gradients(OWN_BATCH[name](), slice(None))["term"] > sum(losses) / 2 + 0.1


TRAIN_TWO = """
from tests.conftest import tiny_tokenizer
from tests.encode.test_ranks import contrastive_trainer
from m3bert.encode.padded_batches import PassCost
PassCost.on = classmethod(lambda cls, device: cls(2, 30))  # each rank has several chunks, not as many as the other
for mini_batch_size, ring in ((None, False), (3, False), (None, True), (3, True)):
    folder = Path(sys.argv[1]) / f"{mini_batch_size} {ring}"
    changes = {"ddp_backend": "gloo", "ring": ring}
    trainer = contrastive_trainer(tiny_tokenizer.__wrapped__(), folder, 8, mini_batch_size, **changes)
    assert trainer.accelerator.num_processes == 2
    passes = []
    trainer.backbone.register_forward_pre_hook(lambda module, args: passes.append(None))
    trainer.train()
    assert len(passes) > 3
    trainer.save_model()
"""


def triplets() -> Dataset:
    """Sixteen triplets of one to four of the tiny tokenizer's words, with repeats."""
    words = "open read file list name text from not".split()
    generator = torch.Generator().manual_seed(2)
    draws = torch.randint(len(words), (ROWS, 3, 4), generator=generator).tolist()
    rows = [[" ".join(words[index] for index in text[text[0] % 4 :]) for text in row] for row in draws]
    rows[9][1] = rows[3][1]
    rows[12][0] = rows[4][0]
    return Dataset.from_list([dict(zip(("anchor", "positive", "negative"), row, strict=True)) for row in rows])


def contrastive_trainer(tokenizer, folder, batch_size, mini_batch_size, **changes) -> trainers.ContrastiveTrainer:
    changes |= {"per_device_train_batch_size": batch_size, "mini_batch_size": mini_batch_size}
    args = trainers.ContrastiveConfig(**quiet(folder, grid="2,6x8,32", **PLAIN_STEP, **changes))
    return trainers.ContrastiveTrainer(quiet_model().model, args, tokenizer, triplets())


def test_a_step_of_two_processes_is_that_of_the_big_batch(of_two, tiny_tokenizer, tmp_path):
    trainer = contrastive_trainer(tiny_tokenizer, tmp_path, ROWS, None)
    trainer.train()
    start = quiet_model().model
    assert not start.embed_tokens.weight.equal(trainer.backbone.embed_tokens.weight)
    for folder in ("None False", "3 False", "None True", "3 True"):
        assert_same_weights(M3BertModel.from_pretrained(of_two / folder), trainer.backbone)
