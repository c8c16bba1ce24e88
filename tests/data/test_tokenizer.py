"""Characters and byte pairs: nothing lost, digits alone, the same after loading."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core import manifest, models, tables
from posttrain.core.config import JobConfig
from posttrain.core.errors import UserError
from posttrain.data import tokenizer as tokenizers
from posttrain.data.tokenizer import EOS, PAD, Config, byte_pairs, characters, main, wrap

PROSE = ["The rivers and the mountains, 1234 of them.\n\nAnd the sea.", "Fellow-citizens of the Senate: the year 1789."] * 30
BPE = wrap(byte_pairs(PROSE, 290))
CHARACTERS = wrap(characters("0123456789=ab#\n é"))


def ids(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def folder(root: Path, reference: str) -> Path:
    path = root / reference / "seed0" / "manifest.json"
    path.parent.mkdir(parents=True)
    return path


@given(st.text("0123456789=ab#\n é", max_size=30))
def test_characters_are_one_token_each(text):
    found = ids(CHARACTERS, text)
    assert len(found) == len(text) and CHARACTERS.decode(found) == text
    assert not {CHARACTERS.pad_token_id, CHARACTERS.eos_token_id} & set(found)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_byte_pairs_lose_nothing(text):
    text = text.replace(PAD, "").replace(EOS, "")
    assert BPE.decode(ids(BPE, text)) == text


@given(st.from_regex(r"[0-9 =+]{0,20}", fullmatch=True))
def test_digits_stand_alone(text):
    pieces = [BPE.decode([i]) for i in ids(BPE, text)]
    assert all(len(p) == 1 for p in pieces if any(c.isdigit() for c in p))


def test_line_feeds_in_a_row_are_tokens_of_their_own():
    assert CHARACTERS.decode(ids(CHARACTERS, "a\n\n\nb")) == "a\n\n\nb" and len(ids(CHARACTERS, "a\n\n\nb")) == 5


def test_special_tokens():
    for tokenizer in (CHARACTERS, BPE):
        assert (tokenizer.pad_token, tokenizer.eos_token) == (PAD, EOS) and (tokenizer.pad_token_id, tokenizer.eos_token_id) == (
            0,
            1,
        )
        assert tokenizer.padding_side == "left" and tokenizer.decode([0, 1, 5], skip_special_tokens=True) == tokenizer.decode([5])
        assert "bos" not in str(tokenizer.special_tokens_map)


def test_sizes():
    assert len(BPE) == 290 and len(CHARACTERS) == 17 + 2
    assert len(wrap(characters("aab"))) == 4  # a letter named twice is one token
    assert len(wrap(byte_pairs(["x"], 258))) == 258


def test_merges_are_learnt_from_the_text_and_the_same_each_time():
    assert len(ids(BPE, PROSE[0])) < len(PROSE[0]) / 1.5
    assert byte_pairs(PROSE, 290).to_str() == byte_pairs(PROSE, 290).to_str()


def test_job_characters(tmp_path):
    output = folder(tmp_path, "data/tokenizer/style")
    main(Config(output=output, kind="characters", alphabet="01=#\n"))
    found = manifest.read(output)
    assert found.metrics["vocabulary"].value == 7 and "tokenizer/tokenizer.json" in found.artifacts
    again = models.load_tokenizer(output)
    assert ids(again, "01\n\n=#") == ids(wrap(characters("01=#\n")), "01\n\n=#") and again.chat_template == tokenizers.TEMPLATE


def test_job_bpe_learns_from_the_training_split_alone(tmp_path):
    corpus = folder(tmp_path, "data/corpus/prose")
    rows = [{"split": "train", "text": t} for t in PROSE] + [{"split": "test", "text": "zyzzyva " * 500}]
    manifest.publish(JobConfig(output=corpus), {}, [tables.write(rows, corpus.parent / "documents.parquet")])
    output = folder(tmp_path, "data/tokenizer/text")
    main(Config(output=output, kind="bpe", vocabulary=290, corpus=corpus))
    again = models.load_tokenizer(output)
    assert again.get_vocab() == BPE.get_vocab() and not any("zyz" in token for token in again.get_vocab())
    assert manifest.read(output).inputs == {"corpus": manifest.sha256(corpus)}


def test_bpe_without_corpus(tmp_path):
    with pytest.raises(UserError, match="kind: bpe needs --corpus"):
        main(Config(output=folder(tmp_path, "data/tokenizer/text"), kind="bpe"))


THINK = ("<think>", "</think>")
DEMONSTRATION = "<think>DE\n 12</think>4"


@pytest.mark.parametrize("kind", ["characters", "bpe"])
def test_further_tokens_are_one_id_each_and_stay_in_the_text(tmp_path, kind):
    """Decoding without special tokens is what rewards and evaluations read: a thought's marks must survive it."""
    corpus = folder(tmp_path, "data/corpus/prose")
    rows = [{"split": "train", "text": text} for text in PROSE]
    manifest.publish(JobConfig(output=corpus), {}, [tables.write(rows, corpus.parent / "documents.parquet")])
    options = {"characters": {"alphabet": "0123456789=ab#<>/DE? \n"}, "bpe": {"vocabulary": 290, "corpus": corpus}}[kind]
    plain, output = folder(tmp_path, "data/tokenizer/plain"), folder(tmp_path, "data/tokenizer/think")
    main(Config(output=plain, kind=kind, **options))
    main(Config(output=output, kind=kind, tokens=THINK, **options))
    before, tokenizer = models.load_tokenizer(plain), models.load_tokenizer(output)
    assert len(tokenizer) == len(before) + 2 == manifest.read(output).metrics["vocabulary"].value
    assert [ids(tokenizer, mark) for mark in THINK] == [[len(before)], [len(before) + 1]]
    assert {t: i for t, i in tokenizer.get_vocab().items() if t not in THINK} == before.get_vocab()
    found = ids(tokenizer, DEMONSTRATION)
    assert [found.count(len(before)), found.count(len(before) + 1)] == [1, 1] and tokenizer.eos_token_id not in found
    for text in (DEMONSTRATION, " <think> 1 </think> 2 ", "<think></think>", "</think><think>"):
        padded = [tokenizer.pad_token_id, *ids(tokenizer, text), tokenizer.eos_token_id]
        assert tokenizer.decode(padded, skip_special_tokens=True) == text
        assert tokenizer.batch_decode([padded], skip_special_tokens=True) == [text]


def test_a_demonstration_goes_through_the_chat_template_and_back(tmp_path):
    from posttrain.data import chat

    output = folder(tmp_path, "data/tokenizer/think")
    main(Config(output=output, kind="characters", alphabet="0123456789=abDE? \n", tokens=THINK))
    tokenizer = models.load_tokenizer(output)
    prompt, response = chat.render(tokenizer, "12=", DEMONSTRATION)
    assert prompt == ids(tokenizer, "12=") == chat.prompt_ids(tokenizer, "12=")
    assert response == [*ids(tokenizer, DEMONSTRATION), tokenizer.eos_token_id]
    assert tokenizer.decode(response, skip_special_tokens=True) == DEMONSTRATION
