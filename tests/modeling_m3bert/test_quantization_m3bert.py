"""The quantizer: codes and their bytes against loops and numpy, thresholds, scores, and loading as remote code."""

import json
from itertools import product

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from m3bert.encode.quantizer import write_quantizer
from m3bert.modeling import M3BertQuantizer, M3BertQuantizerConfig, quantization_m3bert
from tests.conftest import refused


WIDTH = 24
UNIFORM = [code for code in quantization_m3bert.CODES if code != "qama-hybrid"]
DIMS = [1, 2, 3, 7, 8, 13, WIDTH]


def embeddings(rows: int, dtype: torch.dtype = torch.float32, width: int = WIDTH) -> torch.Tensor:
    """Correlated embeddings, always the same."""
    generator = torch.Generator().manual_seed(2)
    mixed = torch.randn(width, width, generator=generator, dtype=torch.float64)
    return (torch.randn(rows, width, generator=generator, dtype=torch.float64) @ mixed).to(dtype)


def make_quantizer(dtype: torch.dtype = torch.float64, width: int = WIDTH, **changes) -> M3BertQuantizer:
    """A quantizer whose parameters all matter, calibrated on embeddings."""
    torch.manual_seed(4)
    quantizer = (
        M3BertQuantizer(M3BertQuantizerConfig(hidden_size=width, **{"layers": [6], **changes})).to(dtype).eval()
    )
    with torch.no_grad():
        for parameter in quantizer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    quantizer.calibrate(embeddings(300, dtype, width))
    return quantizer


@pytest.mark.parametrize("count", [1, 7, 8, 9, 31, 64, 65])
def test_packing_is_that_of_numpy_and_comes_back(count):
    bits = torch.rand(5, count) > 0.5
    packed = quantization_m3bert.pack_bits(bits)
    assert packed.dtype == torch.uint8
    np.testing.assert_array_equal(packed.numpy(), np.packbits(bits.numpy(), axis=1))
    assert torch.equal(quantization_m3bert.unpack_bits(packed, count), bits)


@pytest.mark.parametrize("dim", [*range(1, 18), 384, 385])
def test_stored_bits(dim):
    pairs = -(-dim // 2)
    actual = {code: quantization_m3bert.stored_bits(code, dim) for code in UNIFORM}
    assert actual == {"qama-2": 3 * dim, "qama-1.5": 2 * dim, "qama-1": dim, "qama-0.5": pairs}
    if dim % 8 == 0:
        assert quantization_m3bert.stored_bits("qama-hybrid", dim) == 1.625 * dim
    parts = quantization_m3bert.segments("qama-hybrid", dim)
    assert [start for _, start, _ in parts] == [0, *(end for _, _, end in parts[:-1])] and parts[-1][2] == dim
    assert all((end - start) % 2 == 0 for _, start, end in parts[:-1])
    naive = {"2": lambda n: 3 * n, "1.5": lambda n: 2 * n, "1": lambda n: n, "0.5": lambda n: -(-n // 2)}
    assert quantization_m3bert.stored_bits("qama-hybrid", dim) == sum(
        naive[bits](end - start) for bits, start, end in parts
    )
    assert [bits for bits, _, _ in parts] == sorted((bits for bits, _, _ in parts), key=float, reverse=True)


def naive_bits(quantizer: M3BertQuantizer, vector: torch.Tensor, code: str, dim: int) -> list[int]:
    """One dim at a time, with the codebooks written out."""
    books = {4: ["000", "001", "011", "111"], 3: ["00", "01", "11"], 2: ["0", "1"]}
    z, bits = quantizer(vector), ""
    for name, start, end in quantization_m3bert.segments(code, dim):
        if name == "0.5":
            places = range(start // 2, start // 2 + (end - start + 1) // 2)
            weights = quantizer.pair_weights
            numbers = [
                sum(weights[i, side] * z[2 * i + side] for side in (0, 1) if 2 * i + side < end) for i in places
            ]
        else:
            places = range(start, end)
            numbers = [z[i] for i in places]
        for place, number in zip(places, numbers, strict=True):
            thresholds = quantizer.thresholds(name)[:, place]
            bits += books[quantization_m3bert.LEVELS[name]][sum(bool(number > threshold) for threshold in thresholds)]
    return list(map(int, bits))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("code", quantization_m3bert.CODES)
def test_codes_are_those_of_a_loop(code, dim):
    quantizer, vectors = make_quantizer(), embeddings(9, torch.float64)
    codes = quantizer.encode(vectors, code, dim)
    bits = quantization_m3bert.unpack_bits(codes.packed, codes.bits)
    with torch.no_grad():
        assert bits.int().tolist() == [naive_bits(quantizer, vector, code, dim) for vector in vectors]
    assert (codes.code, codes.dim, codes.bits, len(codes)) == (
        code, dim, quantization_m3bert.stored_bits(code, dim), 9,
    )  # fmt: skip
    assert codes.packed.shape == (9, -(-codes.bits // 8))
    padding = np.unpackbits(codes.packed.numpy(), axis=1)[:, codes.bits :]
    assert not padding.any()


@pytest.mark.parametrize("code", quantization_m3bert.CODES)
@pytest.mark.parametrize("dim", [7, WIDTH])
def test_products_of_signs_are_hamming_distances(code, dim):
    quantizer, vectors = make_quantizer(), embeddings(9, torch.float64)
    codes, others = quantizer.encode(vectors, code, dim), quantizer.encode(-vectors[:4], code, dim)
    bits, other_bits = (quantization_m3bert.unpack_bits(entry.packed, entry.bits) for entry in (codes, others))
    distances = (bits[:, None] != other_bits[None]).sum(dim=2)
    assert distances.any()
    signs = quantizer.signs(codes), quantizer.signs(others)
    assert set(signs[0].unique().tolist()) == {-1.0, 1.0}
    assert torch.equal(signs[0] @ signs[1].T, (codes.bits - 2 * distances).to(signs[0].dtype))
    torch.testing.assert_close(quantizer.hamming(codes, others), 1 - (distances / codes.bits).double())


@pytest.mark.parametrize("dim", [7, WIDTH])
@pytest.mark.parametrize("code", quantization_m3bert.CODES)
def test_decoded_numbers_are_means_of_their_levels(code, dim):
    """Of the embeddings that the quantizer was calibrated with, which are also those that are encoded. An incomplete
    pair of dims has the thresholds and means of the whole pair."""
    quantizer, vectors = make_quantizer(), embeddings(300, torch.float64)
    with torch.no_grad():
        numbers = quantizer.units(vectors, code, dim)
    decoded = quantizer.decode(quantizer.encode(vectors, code, dim))
    assert decoded.shape == numbers.shape
    incomplete = dim % 2 == 1 and quantization_m3bert.segments(code, dim)[-1][0] == "0.5"
    columns = list(zip(numbers.T, decoded.T, strict=True))
    for column, values in columns[: len(columns) - incomplete]:
        for value in values.unique():
            torch.testing.assert_close(value, column[values == value].mean())
    levels = max(quantization_m3bert.LEVELS[bits] for bits, _, _ in quantization_m3bert.segments(code, dim))
    assert max(len(values.unique()) for values in decoded.T) == levels


@pytest.mark.parametrize("code", quantization_m3bert.CODES)
def test_scores_are_cosines_of_float_queries_and_decoded_codes(code):
    quantizer, vectors = make_quantizer(), embeddings(9, torch.float64)
    codes = quantizer.encode(vectors, code, 14)
    queries, decoded = quantizer.units(vectors[:4] * 3, code, 14).detach(), quantizer.decode(codes)
    expected = [[torch.cosine_similarity(q, d, dim=0).item() for d in decoded] for q in queries]
    torch.testing.assert_close(quantizer.scores(vectors[:4], codes), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("levels", [2, 3, 4])
def test_thresholds_are_quantiles_and_means_are_of_their_levels(levels):
    numbers = embeddings(50, torch.float64, 5)
    thresholds = quantization_m3bert.quantile_thresholds(numbers, levels)
    expected = np.quantile(numbers.numpy(), [part / levels for part in range(1, levels)], axis=0)
    np.testing.assert_allclose(thresholds.numpy(), expected)
    actual = quantization_m3bert.levels_of(numbers, thresholds)
    naive = [[sum(x > t for t in thresholds[:, dim]) for dim, x in enumerate(row)] for row in numbers]
    assert actual.tolist() == naive
    assert all(abs(int((actual == level).sum()) - 5 * 50 / levels) <= 5 for level in range(levels))
    means = quantization_m3bert.level_means(numbers, actual, levels)
    for level, dim in product(range(levels), range(5)):
        torch.testing.assert_close(means[level, dim], numbers[actual[:, dim] == level, dim].mean())


def test_thresholds_and_means_follow_a_moving_average():
    quantizer, batch = make_quantizer(momentum=0.9), embeddings(40, torch.float64) ** 2
    with torch.no_grad():
        transformed = quantizer(batch)
    before = {
        bits: (quantizer.thresholds(bits).clone(), quantizer.means(bits).clone())
        for bits in quantization_m3bert.LEVELS
    }
    quantizer.update_thresholds(transformed)
    for bits, levels in quantization_m3bert.LEVELS.items():
        numbers = quantizer.reduce(transformed, bits).detach()
        thresholds = quantization_m3bert.quantile_thresholds(numbers, levels)
        means = quantization_m3bert.level_means(numbers, quantization_m3bert.levels_of(numbers, thresholds), levels)
        for old, new, actual in zip(
            before[bits], (thresholds, means), (quantizer.thresholds(bits), quantizer.means(bits)), strict=True
        ):
            torch.testing.assert_close(actual, 0.9 * old + 0.1 * new)
            assert not torch.allclose(actual, old)


@pytest.mark.parametrize("skip", ["none", "identity", "principal"])
def test_the_transform_is_its_formula(skip):
    quantizer, vectors = make_quantizer(skip=skip), embeddings(5, torch.float64)
    x = vectors / vectors.norm(dim=1, keepdim=True)
    z = torch.nn.functional.gelu(x @ quantizer.up.weight.T + quantizer.up.bias) @ quantizer.down.weight.T
    z = z + quantizer.down.bias
    if skip != "none":
        z = z + (x if skip == "identity" else x @ quantizer.skip.weight.T)
    torch.testing.assert_close(quantizer(vectors), z / z.norm(dim=1, keepdim=True))
    assert (quantizer.skip is not None) == (skip == "principal")


def test_it_starts_as_a_rotation_to_principal_components_mixed_within_each_nested_dim():
    vectors = embeddings(500)
    quantizer = M3BertQuantizer(M3BertQuantizerConfig(hidden_size=WIDTH, dims=[6, 12, WIDTH], skip="principal"))
    quantizer.initialize(vectors)
    rotation = quantizer.skip.weight.detach()
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(WIDTH), atol=1e-5, rtol=0)
    unit = torch.nn.functional.normalize(vectors, dim=1)
    torch.testing.assert_close(quantizer(vectors), unit @ rotation.T, atol=1e-5, rtol=0)
    values = torch.linalg.eigvalsh(torch.cov(unit.T)).flip(0)
    variances = torch.cov((unit @ rotation.T).T)
    for start, end in ((0, 6), (6, 12), (12, WIDTH)):
        block = variances[start:end, start:end]
        torch.testing.assert_close(torch.linalg.eigvalsh(block).flip(0), values[start:end], atol=1e-5, rtol=1e-3)
        assert (block - block.diag().diag()).abs().max() > 1e-4, "mixed"
    assert variances[:6, 6:].abs().max() < 1e-5


def test_one_vector_is_a_call_of_one_row_and_rows_do_not_depend_on_each_other():
    quantizer, vectors = make_quantizer(), embeddings(40, torch.float64)
    for code in quantization_m3bert.CODES:
        whole = quantizer.encode(vectors, code, 13)
        for row in (0, 17):
            assert torch.equal(quantizer.encode(vectors[row], code, 13).packed, whole[row : row + 1].packed)
        assert torch.equal(quantizer.encode(vectors[5:9], code, 13).packed, whole[5:9].packed)
    assert quantizer.encode(vectors[:0], "qama-2").packed.shape == (0, 9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_read_in_the_type_of_the_quantizer(dtype):
    quantizer, vectors = make_quantizer(torch.float32), embeddings(40).to(dtype)
    expected = quantizer.encode(vectors.float(), "qama-2")
    assert torch.equal(quantizer.encode(vectors, "qama-2").packed, expected.packed)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(quantizer.encode(vectors, "qama-2").packed, expected.packed)
        assert quantizer(vectors).dtype == torch.float32
        torch.testing.assert_close(quantizer.decode(expected), make_quantizer(torch.float32).decode(expected))


def test_codes_of_another_quantizer_are_refused():
    vectors = embeddings(9, torch.float64)
    quantizer, other = make_quantizer(), make_quantizer()
    codes = quantizer.encode(vectors, "qama-2")
    assert other.fingerprint == quantizer.fingerprint == codes.fingerprint and len(codes.fingerprint) == 16
    other.decode(codes)
    other.thresholds("2")[0, 3] += 1e-9
    assert other.fingerprint != quantizer.fingerprint
    for call in (
        lambda: other.decode(codes),
        lambda: other.signs(codes),
        lambda: other.scores(vectors, codes),
        lambda: other.hamming(codes, other.encode(vectors, "qama-2")),
        lambda: other.hamming(other.encode(vectors, "qama-2"), codes),
    ):
        refused(f"from another quantizer \\({codes.fingerprint}, .*encode the texts aga", call)
    assert make_quantizer(layers=[2, 6]).fingerprint != quantizer.fingerprint


@pytest.mark.parametrize("code", ["qama-2", "qama-hybrid"])
def test_codes_are_saved_with_all_that_belongs_to_them(tmp_path, code):
    quantizer = make_quantizer()
    codes = quantizer.encode(embeddings(9, torch.float64), code, 13)
    codes.save(tmp_path / "codes.safetensors")
    loaded = quantization_m3bert.Codes.load(tmp_path / "codes.safetensors")
    assert torch.equal(loaded.packed, codes.packed)
    assert (loaded.code, loaded.dim, loaded.fingerprint) == (code, 13, quantizer.fingerprint)
    torch.testing.assert_close(quantizer.hamming(loaded, codes).diag(), torch.ones(9, dtype=torch.float64))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q, x: q.encode(x, "int8"), "'int8' is not a precision of a quantizer; legal values: qama-2, qama-hy"),
        (lambda q, x: q.encode(x, "qama-2", 0), r"dim=0 must be within 1\.\.24, the dims of this quantizer"),
        (lambda q, x: q.encode(x, "qama-2", 25), r"dim=25 must be within 1\.\.24"),
        (lambda q, x: q.encode(x / 0, "qama-2"), "An embedding is not finite"),
        (lambda q, x: q.calibrate(x * torch.nan), "An embedding is not finite"),
        (lambda q, x: q.hamming(q.encode(x, "qama-2"), q.encode(x, "qama-2", 8)), "24 dims and qama-2 at 8 cannot be"),
        (lambda q, x: M3BertQuantizer(q.config).to(x).encode(x, "qama-2"), "has no thresholds yet: train it, or call"),
        (lambda q, x: M3BertQuantizerConfig(hidden_size=8, skip="all"), "skip='all' is unknown; legal values: none, "),
        (lambda q, x: M3BertQuantizerConfig(hidden_size=8, dims=[4, 2, 8]), r"dims=\[4, 2, 8\] must ascend"),
        (lambda q, x: M3BertQuantizerConfig(hidden_size=8, dims=[4]), r"dims=\[4\] must ascend from 1 or more to "),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(call, message):
    refused(message, call, make_quantizer(), embeddings(9, torch.float64))


REMOTE = """
import json
from safetensors.torch import load_file, save_file
from transformers import AutoModel
quantizer = AutoModel.from_pretrained("model", subfolder="quantizer", trust_remote_code=True)
vectors = load_file("vectors.safetensors")["vectors"]
found = {}
for code in CODES:
    codes = quantizer.encode(vectors, code, 13)
    found |= {code: codes.packed, f"{code} scores": quantizer.scores(vectors, codes)}
save_file(found, "found.safetensors")
quantizer.save_pretrained("again")
again = AutoModel.from_pretrained("again", trust_remote_code=True)
print("SAYS", json.dumps([quantizer.fingerprint, again.fingerprint, quantizer.config.layers]))
"""


def test_remote_code_gives_identical_codes(tmp_path, run_bare):
    quantizer, vectors = make_quantizer(torch.float32), embeddings(40)
    assert write_quantizer(tmp_path / "model", quantizer) == tmp_path / "model" / "quantizer"
    save_file({"vectors": vectors}, tmp_path / "vectors.safetensors")
    printed = run_bare(f"CODES = {quantization_m3bert.CODES}\n" + REMOTE)
    (line,) = [line for line in printed.splitlines() if line.startswith("SAYS")]
    assert json.loads(line.removeprefix("SAYS")) == [quantizer.fingerprint, quantizer.fingerprint, [6]]
    actual = load_file(tmp_path / "found.safetensors")
    for code in quantization_m3bert.CODES:
        codes = quantizer.encode(vectors, code, 13)
        assert torch.equal(actual[code], codes.packed)
        assert torch.equal(actual[f"{code} scores"], quantizer.scores(vectors, codes))


@pytest.mark.gpu
def test_a_gpu_gives_the_same_codes():
    quantizer, vectors = make_quantizer(torch.float64), embeddings(40, torch.float64)
    there = make_quantizer(torch.float64).to("cuda")
    assert there.fingerprint == quantizer.fingerprint
    for code in quantization_m3bert.CODES:
        codes, actual = quantizer.encode(vectors, code, 13), there.encode(vectors.to("cuda"), code, 13)
        assert torch.equal(actual.packed.cpu(), codes.packed)
        torch.testing.assert_close(there.scores(vectors.to("cuda"), actual).cpu(), quantizer.scores(vectors, codes))
        torch.testing.assert_close(there.hamming(actual, actual).cpu(), quantizer.hamming(codes, codes))
