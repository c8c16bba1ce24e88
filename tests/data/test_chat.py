"""Rendering: golden tokens and masks, and every template that would shift them is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.errors import UserError
from posttrain.data import chat
from posttrain.data.tokenizer import EOS, byte_pairs, characters, wrap

ALPHABET = "0123456789=ab#"
LINES = ["12=a37#3 the addition of two numbers", "345+278=5+8+0=13 the mountains and the rivers"] * 20


def make_characters():
    return wrap(characters(ALPHABET))


def make_bpe():
    return wrap(byte_pairs(LINES, 300))


CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(params=[make_characters, make_bpe], ids=["characters", "bpe"])
def tokenizer(request):
    return request.param()


def table(tokenizer, prompt: str, response: str) -> list[tuple[str, int]]:
    """(token, in the mask) of a rendered pair."""
    head, tail = chat.render(tokenizer, prompt, response)
    return [(tokenizer.decode([i]), 0) for i in head] + [(tokenizer.decode([i]), 1) for i in tail]


def test_golden_characters():
    assert table(make_characters(), "12=", "a3#3") == [
        ("1", 0),
        ("2", 0),
        ("=", 0),
        ("a", 1),
        ("3", 1),
        ("#", 1),
        ("3", 1),
        (EOS, 1),
    ]
    head, tail = chat.render(make_characters(), "12=", "a3#3")
    assert (head, tail) == ([3, 4, 12], [13, 5, 15, 5, 1])


def test_golden_bpe():
    assert table(make_bpe(), "12=", "a37#3 the mountains") == [
        *((t, 0) for t in ("1", "2", "=")),
        *((t, 1) for t in ("a", "3", "7", "#", "3", " the", " mountains", EOS)),
    ]


def test_golden_chatml_what_follows_eos_is_no_response():
    tokenizer = make_bpe()
    tokenizer.chat_template = CHATML
    head, tail = chat.render(tokenizer, "12=", "a37")
    assert tokenizer.decode(head) == f"<|user|>12={EOS}\n<|assistant|>" and tokenizer.decode(tail) == f"a37{EOS}"


@pytest.mark.parametrize("prompt", ["12=", "9=", "", "0"])
def test_prompt_is_the_head_of_the_whole(tokenizer, prompt):
    head, tail = chat.render(tokenizer, prompt, "a3#3")
    whole = tokenizer.apply_chat_template(
        [*chat.prompt_messages(prompt), {"role": "assistant", "content": "a3#3"}], tokenize=True, return_dict=True
    )["input_ids"]
    assert head == chat.prompt_ids(tokenizer, prompt) and head + tail == whole
    assert tokenizer.decode(head) == prompt and tokenizer.decode(tail, skip_special_tokens=True) == "a3#3"
    assert tail[-1] == tokenizer.eos_token_id and tail.count(tokenizer.eos_token_id) == 1 and len(tail) > 1


@given(st.text(ALPHABET, max_size=8), st.text(ALPHABET, max_size=12))
def test_any_text_of_the_alphabet(prompt, response):
    head, tail = chat.render(CHARACTERS, prompt, response)
    assert len(head) == len(prompt) and len(tail) == len(response) + 1 and 0 not in head + tail


CHARACTERS = make_characters()


def test_empty_response_is_eos_alone(tokenizer):
    assert chat.render(tokenizer, "12=", "")[1] == [tokenizer.eos_token_id]


def test_pad_that_is_eos_keeps_the_eos_label(tokenizer):
    expected = chat.render(tokenizer, "12=", "a3#3")
    tokenizer.pad_token = EOS
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    head, tail = chat.render(tokenizer, "12=", "a3#3")
    assert (head, tail) == expected and tail[-1] == tokenizer.pad_token_id


@pytest.mark.parametrize(
    "template",
    {
        "drops earlier text, as Qwen3 does with thinking": (
            "{% for m in messages %}{% if loop.last or m['role'] == 'assistant' %}{{ m['content'] }}{% endif %}"
            "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
        ),
        "counts turns in front": "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}{{ eos_token }}",
        "marks the last user turn": (
            "{% for m in messages %}{% if loop.last and m['role'] == 'user' %}#{% endif %}{{ m['content'] }}{% endfor %}"
            "{{ eos_token }}"
        ),
        "has another generation prompt": (
            "{% for m in messages %}{% if m['role'] == 'assistant' %}b{% endif %}{{ m['content'] }}{% endfor %}{{ eos_token }}"
            "{% if add_generation_prompt %}a{% endif %}"
        ),
        "ends in no eos": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
        "ends in another token": "{% for m in messages %}{{ m['content'] }}<pad>{% endfor %}",
    }.items(),
    ids=lambda item: item[0],
)
def test_templates_that_would_shift_the_mask_are_refused(tokenizer, template):
    tokenizer.chat_template = template[1]
    tokenizer.name_or_path = "some/model"
    with pytest.raises(UserError, match=r"the chat template of some/model does not keep the prompt '12=' as a token prefix"):
        chat.render(tokenizer, "12=", "a3#3")


def test_a_tokenizer_that_merges_across_the_border_is_refused():
    merging = wrap(byte_pairs(["today"] * 50, 300))
    assert merging.convert_ids_to_tokens(merging("today")["input_ids"]) == ["today"]
    with pytest.raises(UserError, match="token prefix"):
        chat.render(merging, "to", "day")
    assert chat.render(merging, "to", " day")


def test_eos_inside_the_response_ends_at_the_last_one(tokenizer):
    """A model that wrote on after its EOS: the mask covers what the template keeps."""
    _, tail = chat.render(tokenizer, "12=", f"a{EOS}3")
    assert tail.count(tokenizer.eos_token_id) == 2 and tail[-1] == tokenizer.eos_token_id


def test_saved_and_loaded_tokenizer_renders_the_same(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert chat.render(again, "12=", "a3#3 the") == chat.render(tokenizer, "12=", "a3#3 the")
