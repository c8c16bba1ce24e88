"""Packing: nothing lost, nothing seen that should not be."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.data.packing import IGNORE, best_fit, overlapping, pack, split_long

CAPACITY = 16
sizes = st.lists(st.integers(1, CAPACITY), max_size=40)
documents = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=40), min_size=1, max_size=12)
PAD = 0


def reference(lengths: list[int], capacity: int) -> list[list[int]]:
    """Best fit decreasing, slowly: the fullest bin that still takes it, the oldest of those."""
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        room = [(capacity - sum(lengths[i] for i in b), at) for at, b in enumerate(bins)]
        fits = [pair for pair in room if pair[0] >= lengths[index]]
        if fits:
            bins[min(fits)[1]].append(index)
        else:
            bins.append([index])
    return bins


@given(sizes)
def test_best_fit_is_the_slow_one(lengths):
    assert best_fit(lengths, CAPACITY) == reference(lengths, CAPACITY)


@given(sizes)
def test_each_document_once_no_bin_too_full_no_two_bins_that_fit_into_one(lengths):
    bins = best_fit(lengths, CAPACITY)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in b) for b in bins]
    assert all(load <= CAPACITY for load in loads)
    assert all(a + b > CAPACITY for n, a in enumerate(loads) for b in loads[:n])


def test_best_fit_edges():
    assert best_fit([], 4) == [] and best_fit([4, 4], 4) == [[0], [1]] and best_fit([1, 3, 2, 2], 4) == [[1, 0], [2, 3]]
    with pytest.raises(ValueError, match="a document of 5 tokens does not fit into 4"):
        best_fit([1, 5], 4)


def first_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = [b for b in bins if sum(lengths[i] for i in b) + lengths[index] <= capacity]
        fits[0].append(index) if fits else bins.append([index])
    return bins


def test_best_fit_by_hand():
    assert best_fit([7, 6, 4, 3], 10) == [[0, 3], [1, 2]]
    assert best_fit([3, 4, 6, 7], 10) == [[3, 0], [2, 1]]


def test_neither_best_fit_nor_first_fit_is_always_better():
    """Found by search: each needs a bin less than the other once."""
    tight = [14, 8, 7, 4, 3, 2]  # best fit leaves the 4 of [8, 7] to the 4, first fit gives it away with the 14
    assert best_fit(tight, 19) == [[0, 4, 5], [1, 2, 3]] and first_fit_decreasing(tight, 19) == [[0, 3], [1, 2, 4], [5]]
    loose = [15, 14, 9, 6, 3, 3, 2, 2, 2]
    assert len(best_fit(loose, 19)) == 4 and len(first_fit_decreasing(loose, 19)) == 3


@given(sizes)
def test_number_of_bins(lengths):
    """At least the total over the capacity; both decreasing rules need at most 11/9 of the optimum and 6/9 more."""
    bins, other = len(best_fit(lengths, CAPACITY)), len(first_fit_decreasing(lengths, CAPACITY))
    least = -(-sum(lengths) // CAPACITY)
    assert least <= min(bins, other)
    # the optimum is at most either, so each is within the bound of the other
    assert bins <= 11 / 9 * other + 6 / 9 and other <= 11 / 9 * bins + 6 / 9


@given(documents)
def test_split_long_loses_nothing(found):
    pieces = split_long(found, CAPACITY)
    assert all(1 <= len(p) <= CAPACITY for p in pieces)
    assert [t for p in pieces for t in p] == [t for d in found for t in d]
    assert len(pieces) == sum(-(-len(d) // CAPACITY) for d in found)


overlaps = st.integers(1, CAPACITY - 1)


@given(documents, overlaps)
def test_overlapping_chunks_hold_every_token_and_make_each_a_target_once(found, overlap):
    """Tokens are told apart by their place, so that a chunk shows where it came from."""
    marked = [[(d, i) for i in range(len(doc))] for d, doc in enumerate(found)]
    chunks = overlapping(marked, CAPACITY, overlap)
    assert all(1 <= len(chunk) <= CAPACITY for chunk, _ in chunks)
    assert {t for chunk, _ in chunks for t in chunk} == {t for doc in marked for t in doc}
    targets = [t for chunk, context in chunks for t in chunk[max(1, context) :]]
    assert sorted(targets) == [(d, i) for d, doc in enumerate(found) for i in range(1, len(doc))]
    for (one, _), (two, context) in itertools.pairwise(chunks):
        same = one[0][0] == two[0][0]
        assert context == (overlap if same else 0) and (not same or one[-overlap:] == two[:overlap])
    assert all(
        len(chunk) == CAPACITY for (chunk, _), (_, later) in itertools.pairwise(chunks) if later
    )  # only a last one is short
    assert all(len(chunk) > context for chunk, context in chunks)  # no chunk without a token of its own
    short = [doc for doc in marked if len(doc) <= CAPACITY]
    assert overlapping(short, CAPACITY, overlap) == [(doc, 0) for doc in short]


def test_overlapping_by_hand():
    doc = list(range(10))
    assert overlapping([doc], 4, 2) == [([0, 1, 2, 3], 0), ([2, 3, 4, 5], 2), ([4, 5, 6, 7], 2), ([6, 7, 8, 9], 2)]
    assert overlapping([doc], 6, 1) == [([0, 1, 2, 3, 4, 5], 0), ([5, 6, 7, 8, 9], 1)]
    assert overlapping([[], [1]], 4, 3) == [([1], 0)] and overlapping([], 4, 3) == []
    for overlap in (0, 4, 5, -1):
        with pytest.raises(ValueError, match="above 0 and below the length 4"):
            overlapping([doc], 4, overlap)


def test_packed_overlap_is_context_and_no_target():
    packed = pack([[1, 2, 3, 4, 5, 6, 7]], 4, PAD, overlap=2)
    assert packed["input_ids"].tolist() == [[1, 2, 3, 4], [3, 4, 5, 6], [5, 6, 7, 0]]
    assert packed["labels"].tolist() == [[IGNORE, 2, 3, 4], [IGNORE, IGNORE, 5, 6], [IGNORE, IGNORE, 7, IGNORE]]
    assert packed["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 0]]


@given(documents, overlaps)
def test_packed_overlap_has_every_target_once(found, overlap):
    packed = pack(found, CAPACITY, PAD, overlap=overlap)
    targets = packed["labels"][packed["labels"] != IGNORE].tolist()
    assert sorted(targets) == sorted(t for doc in found for t in doc[1:])
    held = packed["labels"] != IGNORE
    assert (packed["labels"][held] == packed["input_ids"][held]).all()


def unpack(packed: dict[str, np.ndarray], row: int) -> list[tuple[list[int], list[int]]]:
    """(ids, labels) of each run of positions that starts at 0, padding left out."""
    positions = packed["position_ids"][row]
    starts = [*np.flatnonzero(positions == 0), len(positions)]
    runs = [slice(a, b) for a, b in itertools.pairwise(starts)]
    for run in runs:
        assert positions[run].tolist() == list(range(run.stop - run.start))
    return [
        (packed["input_ids"][row, r].tolist(), packed["labels"][row, r].tolist())
        for r in runs
        if packed["input_ids"][row, r.start] != PAD
    ]


@given(documents)
def test_pack_holds_every_piece_with_labels_after_its_first_token(found):
    packed = pack(found, CAPACITY, PAD)
    assert {a.dtype for a in packed.values()} == {np.dtype(np.int64)} and {a.shape[1] for a in packed.values()} == {CAPACITY}
    runs = [run for row in range(len(packed["input_ids"])) for run in unpack(packed, row)]
    assert sorted(ids for ids, _ in runs) == sorted(map(list, split_long(found, CAPACITY)))
    assert all(labels == [IGNORE, *ids[1:]] for ids, labels in runs)
    padding = packed["input_ids"] == PAD
    assert (packed["labels"][padding] == IGNORE).all()
    assert (np.diff(padding.astype(int), axis=1) >= 0).all()  # padding only at the end of a row


def test_pack_edges():
    assert pack([], 8, PAD)["input_ids"].shape == (0, 8)
    one = pack([[7]], 4, PAD)
    assert one["labels"].tolist() == [[IGNORE] * 4] and one["position_ids"].tolist() == [[0, 0, 1, 2]]
    full = pack([[1, 2, 3, 4]], 4, PAD)
    assert full["position_ids"].tolist() == [[0, 1, 2, 3]] and full["labels"].tolist() == [[IGNORE, 2, 3, 4]]


def test_labels_where_a_document_holds_the_pad_id():
    """Labels follow where a document lies, not which ids it has (pad may equal EOS)."""
    packed = pack([[5, 0, 0], [6, 0]], 6, PAD)
    assert packed["labels"].tolist() == [[IGNORE, 0, 0, IGNORE, 0, IGNORE]]


# --- through a model ------------------------------------------------------------------------------------------

LENGTHS = [9, 1, 4, 7, 2, 16, 5, 3, 3]


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def model(request):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=31,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
        attn_implementation=request.param,
        use_cache=False,
    )
    found = LlamaForCausalLM(config)
    with torch.no_grad():
        for p in found.parameters():
            p.mul_(5 if p.ndim > 1 else 1)  # strong attention: a document that saw another would differ plainly
    assert found.config._attn_implementation == request.param
    return found


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, 31, size=n).tolist() for n in LENGTHS]


def tensors(packed: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in packed.items()}


def by_document(ids: torch.Tensor, positions: torch.Tensor, logits: torch.Tensor) -> dict[tuple[int, ...], torch.Tensor]:
    """Ids of each document -> its logits."""
    found = {}
    for row in range(len(ids)):
        starts = [*torch.nonzero(positions[row] == 0)[:, 0].tolist(), ids.shape[1]]
        for a, b in itertools.pairwise(starts):
            found[tuple(ids[row, a:b].tolist())] = logits[row, a:b]
    return found


def alone(model, text: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([text])).logits[0]


def test_packed_logits_are_those_of_each_document_alone(model, texts):
    packed = tensors(pack(texts, 16, PAD))
    assert len(packed["input_ids"]) < len(texts)
    with torch.no_grad():
        logits = model(input_ids=packed["input_ids"], position_ids=packed["position_ids"]).logits
        seen = model(input_ids=packed["input_ids"]).logits
    found, contaminated = (by_document(packed["input_ids"], packed["position_ids"], values) for values in (logits, seen))
    for text in texts:
        assert torch.allclose(found[tuple(text)], alone(model, text), atol=1e-4, rtol=1e-4)
    assert max((contaminated[tuple(t)] - alone(model, t)).abs().max() for t in texts) > 0.1  # the check has power


def test_packed_gradient_is_the_sum_over_documents_alone(model, texts):
    packed = tensors(pack(texts, 16, PAD))
    count = int((packed["labels"] != IGNORE).sum())
    assert count == sum(LENGTHS) - len(LENGTHS)

    def gradient(batches: list[dict[str, torch.Tensor]]) -> tuple[float, torch.Tensor]:
        model.zero_grad()
        total = 0.0
        for batch in batches:
            loss = model(**batch, num_items_in_batch=count).loss
            loss.backward()
            total += loss.item()
        return total, torch.cat([p.grad.flatten() for p in model.parameters()])

    together, flat = gradient([packed])
    rows, by_row = gradient([{n: v[i : i + 1] for n, v in packed.items()} for i in range(len(packed["labels"]))])
    single = [torch.tensor([t]) for t in texts if len(t) > 1]
    separate, apart = gradient([{"input_ids": t, "labels": t} for t in single])
    assert together == pytest.approx(separate, rel=1e-5) and rows == pytest.approx(separate, rel=1e-5)
    assert apart.norm() > 0.1
    assert (flat - apart).norm() / apart.norm() < 1e-5 and (by_row - apart).norm() / apart.norm() < 1e-5
    _, mixed = gradient([{n: v for n, v in packed.items() if n != "position_ids"}])
    assert (mixed - apart).norm() / apart.norm() > 0.01


def test_order_of_documents_in_a_row_changes_no_documents_logits(model, texts):
    chosen = [texts[i] for i in (0, 2, 4, 1)]  # 9 + 4 + 2 + 1 = 16
    results = []
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]):
        ids = torch.tensor([[t for i in order for t in chosen[i]]])
        positions = torch.tensor([[p for i in order for p in range(len(chosen[i]))]])
        with torch.no_grad():
            results.append(by_document(ids, positions, model(input_ids=ids, position_ids=positions).logits))
    for text in chosen:
        first = results[0][tuple(text)]
        assert all(torch.allclose(first, other[tuple(text)], atol=1e-4, rtol=1e-4) for other in results[1:])


def test_neighbours_have_no_influence_and_get_no_gradient(model, texts):
    """The gradient of one document's loss with respect to another's embeddings is exactly zero."""
    packed = tensors(pack([texts[0], texts[3]], 16, PAD))
    embedded = model.get_input_embeddings()(packed["input_ids"]).detach().requires_grad_()
    logits = model(inputs_embeds=embedded, position_ids=packed["position_ids"]).logits
    logits[0, 9:].square().sum().backward()
    assert embedded.grad[0, :9].abs().max() == 0 and embedded.grad[0, 9:].abs().max() > 0
