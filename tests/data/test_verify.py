"""The reward: a table of hostile answers, from every kind of caller, in linear time."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.data.verify import correct, equal, extract, number

BOX = "\\boxed{"
STYLES = ["hash", "boxed", "think", "think_optional"]
RIGHT, WRONG = True, False
# (style, response, gold, verdict)
TABLE = [
    # plain
    ("hash", "5+8=13#13", "13", RIGHT),
    ("hash", "#13", "13", RIGHT),
    ("hash", "13", "13", WRONG),  # no mark
    ("hash", "#14", "13", WRONG),
    ("hash", "a4#4", "4", RIGHT),
    ("boxed", BOX + "13}", "13", RIGHT),
    ("boxed", "so it is " + BOX + "13}.", "13", RIGHT),
    ("boxed", "13", "13", WRONG),
    ("boxed", BOX + "31}", "13", WRONG),
    # empty answers
    ("hash", "#", "13", WRONG),
    ("hash", "#   ", "13", WRONG),
    ("hash", "", "13", WRONG),
    ("boxed", BOX + "}", "13", WRONG),
    ("boxed", BOX + " \n }", "13", WRONG),
    ("boxed", "", "13", WRONG),
    ("hash", "\x00", "13", WRONG),
    # several answers
    ("hash", "#13#14", "13", WRONG),
    ("hash", "#13#13", "13", WRONG),
    ("hash", "##13", "13", WRONG),
    ("hash", "#13#", "13", WRONG),
    ("hash", "#1#2", "1#2", WRONG),
    ("hash", "1#2#3#4#5#6#7#8#9#13", "13", WRONG),
    ("boxed", BOX + "12} or " + BOX + "13}", "13", WRONG),
    ("boxed", BOX + "13} and again " + BOX + "13}", "13", WRONG),
    ("boxed", BOX + BOX + "13}}", "13", WRONG),
    ("boxed", BOX + "13}" + BOX, "13", WRONG),
    ("boxed", "Put the answer in \\boxed{}. " + BOX + "13}", "13", WRONG),  # echo of the instruction
    ("hash", "345+278=5+8+0=13,4+7+1=12,3+2+1=06#0623", "623", RIGHT),  # echo of the prompt, then the work
    ("hash", "345+278=#623 345+278=", "623", WRONG),
    ("hash", "345+278=", "623", WRONG),
    # braces
    ("boxed", BOX + "{13}}", "{13}", RIGHT),
    ("boxed", BOX + "\\frac{1}{2}}", "\\frac{1}{2}", RIGHT),
    ("boxed", BOX + "{{{13}}}}", "13", WRONG),
    ("boxed", BOX + "13", "13", WRONG),  # never closed
    ("boxed", BOX + "{13}", "13", WRONG),
    ("boxed", BOX + "13}}", "13", RIGHT),  # the first closing brace ends it
    ("boxed", "}" + BOX + "13}", "13", RIGHT),
    ("boxed", "\\boxed 13", "13", WRONG),
    ("boxed", "boxed{13}", "13", WRONG),
    ("boxed", "\\Boxed{13}", "13", WRONG),
    ("boxed", "\\boxed{13\x00}", "13", WRONG),
    ("boxed", BOX + "{" * 10_000 + "13" + "}" * 10_000 + "}", "13", WRONG),
    ("boxed", BOX + "{" * 10_000, "13", WRONG),
    ("boxed", "{" * 10_000 + BOX + "13}" + "}" * 10_000, "13", RIGHT),
    ("boxed", (BOX + "13}") * 1000, "13", WRONG),
    # units and words
    ("hash", "#13 apples", "13", WRONG),
    ("hash", "#$13", "13", WRONG),
    ("hash", "#13%", "13", WRONG),
    ("hash", "#13.", "13", WRONG),
    ("hash", "#the answer is 13", "13", WRONG),
    ("boxed", BOX + "13 cm}", "13", WRONG),
    ("boxed", BOX + "\\text{13}}", "13", WRONG),
    ("boxed", BOX + "x = 13}", "13", WRONG),
    # numbers by value
    ("hash", "#0013", "13", RIGHT),
    ("hash", "#13.0", "13", RIGHT),
    ("hash", "#13.000", "13", RIGHT),
    ("hash", "#+13", "13", RIGHT),
    ("hash", "#-13", "13", WRONG),
    ("hash", "#--13", "-13", WRONG),
    ("hash", "# -13 ", "-13", RIGHT),
    ("hash", "#- 13", "-13", WRONG),
    ("hash", "#-0", "0", RIGHT),
    ("hash", "#.5", "0.5", RIGHT),
    ("hash", "#0.50", "0.5", RIGHT),
    ("hash", "#0.1", "0.10000000000000001", WRONG),  # decimals, not floats
    ("hash", "#13.0000000001", "13", WRONG),
    ("hash", "#1/2", "0.5", WRONG),
    ("hash", "#13 ", "13.0", RIGHT),
    ("hash", "#1 3", "13", WRONG),
    ("hash", "#1\n3", "13", WRONG),
    ("hash", "#13\n", "13", RIGHT),
    # thousands separators
    ("hash", "#1,234", "1234", RIGHT),
    ("hash", "#1234", "1,234", RIGHT),
    ("hash", "#12,345,678.5", "12345678.5", RIGHT),
    ("hash", "#1,23", "123", WRONG),
    ("hash", "#1,2345", "12345", WRONG),
    ("hash", "#1234,567", "1234567", WRONG),
    ("hash", "#,123", "123", WRONG),
    ("hash", "#1,,234", "1234", WRONG),
    ("hash", "#1.234,5", "1234.5", WRONG),
    ("hash", "#1_234", "1234", WRONG),
    ("hash", "#1 234", "1234", WRONG),
    # what Python would read as a number
    ("hash", "#1e5", "100000", WRONG),
    ("hash", "#1e1", "10", WRONG),
    ("hash", "#0x0d", "13", WRONG),
    ("hash", "#nan", "13", WRONG),
    ("hash", "#nan", "0", WRONG),
    ("hash", "#inf", "13", WRONG),
    ("hash", "#Infinity", "inf", WRONG),
    ("hash", "#9" + "9" * 500, "inf", WRONG),
    ("hash", "#1e999999999", "13", WRONG),
    ("hash", "#6+7", "13", WRONG),
    ("hash", "#__import__('os').getpid()", "13", WRONG),
    ("hash", "#True", "1", WRONG),
    # unicode
    ("hash", "#١٣", "13", WRONG),  # Arabic-Indic digits
    ("hash", "#１３", "13", WRONG),  # full width
    ("hash", "#1³", "13", WRONG),
    ("hash", "#①③", "13", WRONG),
    ("hash", "#−13", "-13", WRONG),  # a minus sign that is no hyphen
    ("hash", "#13\u200b", "13", WRONG),
    ("hash", "#\u00a013\u00a0", "13", RIGHT),  # spaces, only wider
    ("hash", "＃13", "13", WRONG),
    ("hash", "#\u202e31", "13", WRONG),
    ("boxed", "\\boxed｛13｝", "13", WRONG),
    # text answers
    ("boxed", BOX + "Yes}", "yes", RIGHT),
    ("boxed", BOX + "  two   words\n}", "Two words", RIGHT),
    ("boxed", BOX + "twowords}", "two words", WRONG),
    ("boxed", BOX + "yes!}", "yes", WRONG),
    ("hash", "#INCORRECT", "correct", WRONG),
    ("hash", "#not correct", "correct", WRONG),
    ("hash", "#[1, 2]", "[1, 2]", RIGHT),
    ("hash", "#a", "b", WRONG),
    # gold that is no number is compared as text, never evaluated and never a free reward
    ("hash", "#nan", "nan", RIGHT),
    ("hash", "#1e5", "1e5", RIGHT),
    ("hash", "#anything", "\\frac{", WRONG),
    ("boxed", BOX + "}", "\\frac{", WRONG),
    # a thought and then the answer; `think` demands the form, `think_optional` does not
    ("think", "<think>1+2=3</think>3", "3", RIGHT),
    ("think", " \n<think> 1 </think>\n 3 \n", "3", RIGHT),
    ("think", "<think></think>3", "3", RIGHT),
    ("think", "<think>4</think>03.0", "3", RIGHT),
    ("think", "<think>3</think>4", "3", WRONG),
    ("think", "3", "3", WRONG),  # a right answer outside the form earns nothing
    ("think", "1+2=3 3", "3", WRONG),
    ("think", "<think>1+2=3 3", "3", WRONG),  # the thought does not end
    ("think", "1+2=3</think>3", "3", WRONG),  # nor begin
    ("think", "So: <think>1</think>3", "3", WRONG),  # text before the thought
    ("think", "3<think>1</think>3", "3", WRONG),
    ("think", "<think>1</think>3<think>2</think>3", "3", WRONG),  # two thoughts
    ("think", "<think>1</think><think>2</think>3", "3", WRONG),
    ("think", "<think>a<think>b</think>c</think>3", "3", WRONG),  # one inside the other
    ("think", "<think><think>1</think>3", "3", WRONG),  # begun twice
    ("think", "<think>1</think>3</think>", "3", WRONG),
    ("think", "<think>1</think>3<think>", "3", WRONG),
    ("think", "<think>1</think>", "3", WRONG),
    ("think", "<think>3</think> \n", "3", WRONG),
    ("think", "</think>3<think>", "3", WRONG),
    ("think", "<think>1</think>3 apples", "3", WRONG),
    ("think", "<think>1</think >3", "3", WRONG),
    ("think", "<Think>1</Think>3", "3", WRONG),
    ("think", "<think>DE</think>Europe", "europe", RIGHT),
    ("think_optional", "<think>1+2=3</think>3", "3", RIGHT),
    ("think_optional", "3", "3", RIGHT),
    ("think_optional", " 3\n", "3", RIGHT),
    ("think_optional", "1+2=3</think>3", "3", RIGHT),
    ("think_optional", "So: <think>1</think>3", "3", RIGHT),
    ("think_optional", "<think>3</think>4", "3", WRONG),
    ("think_optional", "1+2=3 3", "3", WRONG),  # all of it is the answer
    ("think_optional", "<think>3", "3", WRONG),
    ("think_optional", "<think>1</think>3<think>2</think>3", "3", WRONG),
    ("think_optional", "<think>a<think>b</think>c</think>3", "3", WRONG),
    ("think_optional", "<think>3</think>", "3", WRONG),
    ("think_optional", "", "3", WRONG),
    # length
    ("hash", "#" + "0" * 98 + "13", "13", RIGHT),
    ("hash", "#" + "0" * 5000 + "13", "13", WRONG),  # no plain number is that long
    ("hash", "x" * 100_000 + "#13", "13", RIGHT),
    ("hash", "#" + "1" * 100_000, "13", WRONG),
]


def test_the_table_is_long_and_has_both_verdicts():
    assert len(TABLE) >= 100 and {row[3] for row in TABLE} == {RIGHT, WRONG} and len({row[:3] for row in TABLE}) == len(TABLE)


@pytest.mark.parametrize(("style", "text", "gold", "verdict"), TABLE, ids=[f"{r[0]}-{r[1][:24]!a}-{r[2][:10]!a}" for r in TABLE])
def test_table(style, text, gold, verdict):
    assert correct(text, gold, style) is verdict


def test_table_from_a_thread():
    """An alarm-based timeout fails off the main thread, and a broad except turned that into reward 0."""
    found: list[bool] = []
    before = [signal.getsignal(n) for n in (signal.SIGALRM, signal.SIGINT)]
    worker = threading.Thread(target=lambda: found.extend(correct(text, gold, style) for style, text, gold, _ in TABLE))
    worker.start()
    worker.join()
    assert found == [row[3] for row in TABLE] and before == [signal.getsignal(n) for n in (signal.SIGALRM, signal.SIGINT)]


def test_table_from_a_process():
    styles, texts, golds, verdicts = zip(*TABLE, strict=True)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert tuple(pool.map(correct, texts, golds, styles)) == verdicts


@pytest.mark.parametrize("gold", ["", " ", "\n\t", "\u00a0"])
@pytest.mark.parametrize("text", ["#13", "#", "", BOX + "}", "# ", "<think></think>"])
@pytest.mark.parametrize("style", STYLES)
def test_empty_gold_is_an_error_and_never_a_reward(gold, text, style):
    with pytest.raises(ValueError, match="gold answer is empty"):
        correct(text, gold, style)


@pytest.mark.parametrize(
    "text",
    [
        BOX * 16_000,
        BOX + "{" * 100_000,
        BOX + "}" * 100_000,
        "#" * 100_000,
        "\\" * 100_000,
        BOX + "{}" * 50_000,
        "#" + "1," * 50_000,
        "#" + "1" * 100_000 + ".",
        "# " + "a " * 50_000,
        "#" + " " * 100_000,
        BOX + " " * 100_000 + "}",
        "#" + "-" * 100_000,
        "x" * 100_000,
        "#" + "111," * 25_000 + "1",
        "{" * 50_000 + BOX + "}" * 50_000,
        "<think>" * 15_000,
        "</think>" * 15_000,
        "<think>" + "<" * 100_000 + "</think>" + "<think" * 15_000,
        " " * 100_000 + "<think></think>" + " " * 100_000 + "13",
    ],
    ids=lambda t: f"{t[:10]!a}x{len(t)}",
)
def test_hostile_texts_of_100_kb_take_linear_time(text):
    """Quadratic time would be minutes; the bound is a hundred times what is needed."""
    start = time.process_time()
    for style in STYLES:
        for gold in ("13", "a" * 1000, text):
            correct(text, gold, style)
    assert time.process_time() - start < 2


PIECES = ["#", BOX, "\\boxed", "{", "}", "}", "1", "23", ",", ",000", ".", "-", "+", " ", "e", "a", "\n"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=16).map("".join)


@pytest.mark.parametrize("text", ["", "#", "# \n", BOX + "}", BOX + "  }", "\\boxed", "#1#", BOX, BOX + "{}"])
def test_extract_finds_no_empty_answer(text):
    assert extract(text, "hash") is None and extract(text, "boxed") is None


@given(TEXTS, st.sampled_from(["hash", "boxed"]))
def test_extract_never_fails_and_gives_stripped_text_of_the_response(text, style):
    found = extract(text, style)
    assert found is None or (found and found == found.strip() and found in text)
    if found is not None:
        mark = "#" if style == "hash" else BOX
        assert text.count(mark) == 1


@given(TEXTS)
def test_every_number_is_what_decimal_reads(text):
    found = number(text)
    if found is not None:
        assert found == Decimal(text.strip().replace(",", "")) and found.is_finite()


@given(st.decimals(-(10**6), 10**6, places=3), st.booleans())
def test_grouping_and_zeros_do_not_change_a_number(value, grouped):
    plain, written = f"{value:f}", f"{value:,f}" if grouped else f"{value:f}00"
    assert equal(written, plain) and equal(plain, written) and not equal(written, f"{value + 1:f}")


@given(TEXTS.filter(str.strip), TEXTS.filter(str.strip))
def test_equal_is_symmetric_and_reflexive(a, b):
    assert equal(a, a) and equal(a, b) == equal(b, a)


THOUGHTS = st.lists(st.sampled_from(["<think>", "</think>", "<think", "think>", "1", "3", " ", "\n", "a"]), max_size=8).map(
    "".join
)


@given(THOUGHTS)
def test_the_gate_only_takes_away(text):
    """What passes the gate is the same answer without it; a response without any tag never passes it."""
    gated, free = extract(text, "think"), extract(text, "think_optional")
    assert gated is None or gated == free
    assert free is None or (free and text.rstrip().endswith(free) and "<think>" not in free and "</think>" not in free)
    if gated is not None:
        head, tail = text.split("</think>")  # exactly one end
        assert head.lstrip().startswith("<think>") and tail.strip() == gated
    if "<think>" not in text and "</think>" not in text:
        assert gated is None and free == (text.strip() or None)
