"""Overlap: copies are found however they were changed, other text is not."""

from __future__ import annotations

import random
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.data.decontamination import WORD, grams, overlap

VOCABULARY = [a + b + c for a in "bdfgklmnprst" for b in "aeiou" for c in "lmnrst"]


def text(seed: int, words: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(VOCABULARY) for _ in range(words))


HELD = [text(i, 60) for i in range(20)]
OTHER = [text(1000 + i, 300) for i in range(20)]
COPIES = {
    "verbatim": lambda t: t,
    "re-wrapped": lambda t: textwrap.fill(t, 30),
    "indented": lambda t: textwrap.indent(textwrap.fill(t, 40), "    > "),
    "embedded": lambda t: f"{text(801, 200)} {t} {text(802, 200)}",
    "embedded without spaces around": lambda t: f"{text(801, 50)}({t}){text(802, 50)}",
    "upper case": str.upper,
    "punctuation": lambda t: ", ".join(t.split()) + "!?",
    "tabs and quotes": lambda t: "\t".join(f'"{w}"' for w in t.split()),
    "markdown": lambda t: "*" + "_ _".join(t.split()) + "*",
}


@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
def test_copies_are_found(copy):
    training = [*OTHER, *(copy(t) for t in HELD[::2])]
    found = overlap(HELD, training)
    assert found == [1.0, 0.0] * 10


def test_shuffled_text_is_not_found():
    """The same words in another order: no false positive."""
    rng = random.Random(0)
    shuffled = []
    for t in HELD:
        words = t.split()
        rng.shuffle(words)
        shuffled.append(" ".join(words))
    assert overlap(HELD, [*shuffled, *OTHER]) == [0.0] * 20


def test_case_of_the_evaluation_text_takes_no_part():
    assert overlap([t.title() for t in HELD[:2]], HELD[:1]) == [1.0, 0.0]


def test_a_partial_copy_gives_its_share():
    words = HELD[0].split()
    (found,) = overlap(HELD[:1], [" ".join(words[:36])])
    assert found == pytest.approx((36 - 12) / (60 - 12))


@pytest.mark.parametrize("length", [1, 3, 7, 12, 13])
def test_prompts_of_few_words_are_compared_too(length):
    """open-r1's script has no n-gram for prompts under 8 words, so it never flags them."""
    prompt = text(5, length)
    assert overlap([prompt], [f"{text(6, 40)} {prompt} {text(7, 40)}"]) == [1.0]
    assert overlap([prompt], [prompt]) == [1.0]
    assert overlap([prompt], [" ".join(reversed(prompt.split())) + "x"]) == [0.0]


def test_arithmetic_signs_count():
    assert overlap(["345+278="], ["345+278=623"]) == [1.0]
    assert overlap(["345+278="], ["345-278=67", "345 278", "1345+278=", "345+2789="]) == [0.0]


def test_a_gram_does_not_cross_documents():
    words = HELD[0].split()
    assert overlap(HELD[:1], [" ".join(words[:12]), " ".join(words[12:24])]) == [0.0]


def test_nothing_to_compare():
    assert overlap([], ["a"]) == [] and overlap(["", "?!  _"], ["", "?!"]) == [0.0, 0.0] and overlap(["a b"], []) == [0.0]
    assert grams("?!", 3) == set()


def test_generators_are_fine():
    assert overlap((t for t in HELD[:2]), (t for t in HELD[:1])) == [1.0, 0.0]


WORDS = st.lists(st.sampled_from(["a", "b", "c", "1", "+"]), max_size=14)


@given(st.lists(WORDS, max_size=4), st.lists(WORDS, max_size=4), st.integers(1, 5))
def test_against_brute_force(evaluation, training, n):
    def shares(words):
        size = min(n, len(words))
        own = {tuple(words[i : i + size]) for i in range(len(words) - size + 1)} if words else set()
        seen = [g for g in own if any(g == tuple(t[i : i + size]) for t in training for i in range(len(t) - size + 1))]
        return len(seen) / len(own) if own else 0.0

    assert overlap(map(" ".join, evaluation), map(" ".join, training), n) == [shares(words) for words in evaluation]


def test_words():
    assert WORD.findall("Don't_stop: x=3.5, naïve Größe 数学") == [
        "Don",
        "t",
        "stop",
        "x",
        "=",
        "3",
        "5",
        "naïve",
        "Größe",
        "数学",
    ]
