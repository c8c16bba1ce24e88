"""What a model makes of held-out rows and of facts, against the long way round."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from posttrain.core import manifest, tables
from posttrain.core.config import JobConfig
from posttrain.core.errors import UserError
from posttrain.core.generation import sample
from posttrain.data.packed import held_out_loss, recall, rows, vocabulary
from tests.checkpoints import tiny

DOCUMENTS = {"a": [[2, 3, 4, 5, 1], [6, 7, 1], [3] * 11 + [1]], "b": [[9, 8, 7, 1], [2, 1]]}
TOKENIZER = tiny(3)[1]


@pytest.fixture
def mix(tmp_path) -> Path:
    output = tmp_path / "data/mix/m/seed0/manifest.json"
    output.parent.mkdir(parents=True)
    table = [{"split": "validation", "source": s, "input_ids": ids} for s, found in DOCUMENTS.items() for ids in found]
    table += [{"split": "train", "source": "a", "input_ids": [4, 4, 4, 1]}]
    card = {"vocabulary": vocabulary(TOKENIZER)}
    manifest.publish(JobConfig(output=output), {}, [tables.write(table, output.parent / "documents.parquet")], card=card)
    return output


def alone(model, documents: list[list[int]]) -> tuple[float, int]:
    """(mean negative log-likelihood, targets), one document at a time in double precision."""
    total, count = 0.0, 0
    with torch.inference_mode():
        for ids in documents:
            logp = model(torch.tensor([ids]), use_cache=False).logits[0, :-1].double().log_softmax(-1)
            total -= logp.gather(-1, torch.tensor(ids[1:])[:, None]).sum().item()
            count += len(ids) - 1
    return total / count, count


@pytest.mark.parametrize("source", ["a", "b", None])
@pytest.mark.parametrize("batch", [1, 32])
def test_loss_of_one_source_is_that_of_its_documents_alone(mix, source, batch):
    model, _ = tiny(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # far from uniform, so that a token of another document would show
    documents = [ids for name, found in DOCUMENTS.items() if source in (None, name) for ids in found]
    data = rows(mix, "validation", 16, TOKENIZER, source=source)
    loss, count = held_out_loss(model, data, batch)
    expected, targets = alone(model, documents)
    assert count == targets and loss == pytest.approx(expected, rel=1e-5)


def test_documents_longer_than_a_row_are_cut(mix):
    model, _ = tiny(3)
    data = rows(mix, "validation", 8, TOKENIZER, source="a")
    found, count = held_out_loss(model, data)
    cut = [piece for ids in DOCUMENTS["a"] for piece in (ids[:8], ids[8:]) if piece]
    expected, targets = alone(model, cut)
    assert (found, count) == (pytest.approx(expected, rel=1e-5), targets) and {len(row["input_ids"]) for row in data} == {8}
    _, with_overlap = held_out_loss(model, rows(mix, "validation", 8, TOKENIZER, source="a", overlap=3))
    assert with_overlap == sum(len(ids) - 1 for ids in DOCUMENTS["a"]) > count  # a cut with context loses no target


def test_a_source_that_is_not_there_is_named(mix):
    with pytest.raises(UserError, match=r"documents\.parquet has no rows for .*'c'"):
        rows(mix, "validation", 8, TOKENIZER, source="c")
    with pytest.raises(UserError, match=r"has no rows for .*'b'"):
        rows(mix, "train", 8, TOKENIZER, source="b")


PROMPTS = ["1=", "12345=", "999", "0123456789=ab", "b", "##==", "31=2", "7" * 20]


def skilled(seed: int):
    """A model whose greedy continuations vary with the prompt: random weights, made large."""
    model, tokenizer = tiny(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(1.0 if "norm" in name else 8.0)
    return model.eval(), tokenizer


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("batch", [1, 3, 256])
def test_recall_is_greedy_decoding_being_right_token_for_token(seed, batch):
    model, tokenizer = skilled(seed)
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in PROMPTS]
    drawn = sample(model, tokenizer, prompts, count=1, max_new_tokens=6, seed=0, temperature=0)
    questions, expected, wrong_at = [], [], set()
    for prompt, ids, (one,) in zip(PROMPTS, prompts, drawn, strict=True):
        said = tokenizer.decode([i for i in one.ids if i > 1])[: one.ids.index(1) if 1 in one.ids else None]
        if 0 in one.ids or not said:
            continue  # padding, or an end at once: no text says that
        for answer in {said[:n] for n in (1, 3, len(said))}:
            questions.append({"prompt": prompt, "answer": answer})
            expected.append(True)
            for at in range(len(answer)):
                other = answer[:at] + ("0" if answer[at] != "0" else "1") + answer[at + 1 :]
                questions.append({"prompt": prompt, "answer": other})
                ((again,),) = sample(model, tokenizer, [ids], count=1, max_new_tokens=len(other), seed=0, temperature=0)
                expected.append(again.ids == tokenizer(other, add_special_tokens=False)["input_ids"])
                wrong_at.add(at)
    found = recall(model, tokenizer, questions, batch)
    assert found == expected and sum(found) > 3 and found.count(False) > 10 and len(wrong_at) > 2
    assert len({q["answer"] for q, f in zip(questions, found, strict=True) if f}) > 2  # not one answer for all prompts


def test_recall_does_not_depend_on_the_questions_beside_it():
    model, tokenizer = skilled(0)
    questions = [{"prompt": prompt, "answer": answer} for prompt in PROMPTS for answer in ("1", "=", "a", "77", "0")]
    together = recall(model, tokenizer, questions)
    assert together == [recall(model, tokenizer, [one])[0] for one in questions]
