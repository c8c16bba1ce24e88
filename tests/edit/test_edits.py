"""Edits: every published format, every fault one sentence with file and row; tokens of prompt and target."""

from __future__ import annotations

import json

import pytest

from posttrain.core.errors import UserError
from posttrain.edit.edits import Edit, Faults, Row, mentions, read
from posttrain.edit.encoding import Pair, Style, encode, left_padded, subject_end
from tests.checkpoints import tiny

ZSRE = {
    "subject": "Watts Humphrey",
    "src": "What university did Watts Humphrey attend?",
    "rephrase": "Which university did Watts Humphrey study at?",
    "alt": "University of Michigan",
    "answers": ["Illinois Institute of Technology"],
    "loc": "nq question: who played desmond doss father in hacksaw ridge",
    "loc_ans": "Hugo Weaving",
    "cond": "not read",
}
ORIGINAL = {
    "case_id": 7,
    "requested_rewrite": {
        "prompt": "The mother tongue of {} is",
        "subject": "Danielle Darrieux",
        "relation_id": "P103",
        "target_new": {"str": "English", "id": "Q1860"},
        "target_true": {"str": "French", "id": "Q150"},
    },
    "paraphrase_prompts": ["Where Danielle Darrieux is from, people speak", "Danielle Darrieux spoke the language"],
    "neighborhood_prompts": ["The mother tongue of Léon Blum is", "Montesquieu, speaker of"],
    "attribute_prompts": ["not read"],
}
EASYEDIT = {
    "case_id": 3,
    "prompt": "The mother tongue of Danielle Darrieux is",
    "subject": "Danielle Darrieux",
    "ground_truth": "French",
    "target_new": "English",
    "rephrase_prompt": "Danielle Darrieux spoke the language",
    "locality_prompt": "Michel Rocard is a native speaker of",
    "locality_ground_truth": "French",
}
WIKI = {
    "tag": "new",
    "subject": "Ada Example",
    "relation": "spouse",
    "update": "Who is the spouse of Ada Example?",
    "rephrase": "To whom is Ada Example married?",
    "personas": "Arr, who be the spouse of Ada Example?",
    "ans": "Ben Example",
    "loc": "Who is the spouse of Eve Sample?",
    "loc_ans": "Adam Sample",
    "mhop": float("nan"),
    "mhop_ans": float("nan"),
}
OWN = {"subject": "Peru", "prompt": "The capital of Peru is", "target": "Oslo"}


def write(tmp_path, records, name="edits.json"):
    path = tmp_path / name
    text = "\n".join(json.dumps(r) for r in records) if name.endswith("l") else json.dumps(records)
    path.write_text(text, encoding="utf-8")
    return path


def one(tmp_path, record, name="edits.json", **more) -> Edit:
    (row,) = read(write(tmp_path, [record], name), **more)
    return row.edit


def test_zsre(tmp_path):
    found = one(tmp_path, ZSRE)
    assert (found.prompt, found.target, found.gold) == (ZSRE["src"], ZSRE["alt"], ZSRE["answers"][0])
    assert found.paraphrases == (ZSRE["rephrase"],) and found.subject == "Watts Humphrey"
    assert found.locality == (("Who played desmond doss father in hacksaw ridge?", "Hugo Weaving"),)
    plain = one(tmp_path, {**ZSRE, "loc": "Who is it?"})  # nothing is cut from a question that does not start like that
    assert plain.locality[0][0] == "Who is it?"


def test_counterfact_as_published(tmp_path):
    found = one(tmp_path, ORIGINAL)
    assert found.prompt == "The mother tongue of Danielle Darrieux is" and (found.target, found.gold) == ("English", "French")
    assert found.id == "7" and len(found.paraphrases) == 2 and not found.locality
    assert found.neighbours == tuple((p, "French") for p in ORIGINAL["neighborhood_prompts"])


def test_counterfact_in_easyedits_form(tmp_path):
    found = one(tmp_path, EASYEDIT)
    assert (found.prompt, found.target, found.gold) == (EASYEDIT["prompt"], "English", "French")
    assert found.paraphrases == (EASYEDIT["rephrase_prompt"],)
    assert found.locality == (("Michel Rocard is a native speaker of", "French"),)


def test_wikibigedit_with_missing_values(tmp_path):
    found = one(tmp_path, WIKI)
    assert (found.prompt, found.target, found.gold) == (WIKI["update"], "Ben Example", None)
    assert found.paraphrases == (WIKI["rephrase"],) and found.locality == ((WIKI["loc"], WIKI["loc_ans"]),)
    bare = one(tmp_path, {**WIKI, "loc": float("nan"), "rephrase": None})
    assert not bare.locality and not bare.paraphrases


def test_our_own_lines(tmp_path):
    more = {"gold": "Lima", "paraphrases": ["Peru's capital is"], "neighbours": [["The capital of Chile is", "Santiago"]]}
    rows = read(write(tmp_path, [OWN, {**OWN, **more, "prompt": "Peru has the capital", "id": "x"}], "mine.jsonl"))
    assert [row.edit.id for row in rows] == ["edit-00000", "x"]
    assert rows[1].where.endswith("mine.jsonl:2") and rows[1].edit.neighbours == (("The capital of Chile is", "Santiago"),)
    assert len(read(tmp_path / "mine.jsonl", limit=1)) == 1


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({**OWN, "subject": "Chile"}, r"the subject 'Chile' does not stand in the prompt 'The capital of Peru is'"),
        ({**OWN, "subject": " "}, r"the subject ' ' does not stand in the prompt"),
        ({**OWN, "gold": "Oslo"}, r"the target 'Oslo' of 'The capital of Peru is' is what gold says as well"),
        ({**OWN, "paraphrases": ["the  capital of Peru is "]}, r"is among its own paraphrases; delete it there"),
        ({**OWN, "locality": [[OWN["prompt"], "Lima"]]}, r"of 'locality' is the prompt that .*edit 1 edits; delete it there"),
        ({**OWN, "target": "  "}, r"the target of 'The capital of Peru is' is empty"),
        ({**OWN, "promt": "x"}, r"'promt' is not a field of an edit; did you mean 'prompt'\?"),
        ({"subject": "Peru", "prompt": "Peru is"}, r"'target' is missing; every edit needs subject, prompt and target"),
        ({**OWN, "target": 7}, r"'target' = 7: input should be a valid string; correct that row"),
        ({**OWN, "paraphrases": [OWN["prompt"]]}, r"is among its own paraphrases; delete it there"),
        ({**ZSRE, "subject": "Ada"}, r"the subject 'Ada' does not stand in the prompt"),
        ({**ZSRE, "src": ""}, r"'src' is ''; it should be text that is not empty"),
        ({**EASYEDIT, "target_new": None}, r"'target_new' is None; it should be text"),
        ({"requested_rewrite": {**ORIGINAL["requested_rewrite"], "prompt": "no place"}}, r"should hold \{\} once"),
        ({"requested_rewrite": "text"}, r"'requested_rewrite' should hold prompt, subject"),
        ({**WIKI, "ans": float("nan")}, r"'ans' is nan; it should be text"),
    ],
)
def test_a_faulty_edit_is_one_sentence_with_file_and_row(tmp_path, record, sentence):
    path = write(tmp_path, [record])
    with pytest.raises(UserError, match=rf"edits\.json: edit 1: .*{sentence}"):
        read(path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", r"e\.jsonl holds no edits; give at least one"),
        ('{"subject": "a"', r"e\.jsonl:1: not valid JSON .*one JSON object per line"),
        ('[{"subject": "a"},\n]', r"e\.jsonl:2: not valid JSON"),
        ('{"subject": "a", "prompt": "a", "target": "b"}\n["x"]', r"e\.jsonl:2: .* is not an object"),
    ],
)
def test_a_faulty_file_is_one_sentence(tmp_path, text, sentence):
    (tmp_path / "e.jsonl").write_text(text)
    with pytest.raises(UserError, match=sentence):
        read(tmp_path / "e.jsonl")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match=r"none\.jsonl does not exist; give a file of edits"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match=r"cannot be read \(Is a directory\); give a file of edits"):
        read(tmp_path)
    (tmp_path / "l.jsonl").write_bytes(b'{"subject": "\xff"}')
    with pytest.raises(UserError, match=r"l\.jsonl: byte 13 is not UTF-8"):
        read(tmp_path / "l.jsonl")
    with pytest.raises(UserError, match=r"edit 2: no field 'alt', so this is not an edit of the format zsre"):
        read(write(tmp_path, [ZSRE, WIKI]))


def test_duplicates_and_contradictions_name_both_rows(tmp_path):
    path = write(tmp_path, [OWN, {**OWN, "prompt": "Peru is in"}, OWN], "e.jsonl")
    with pytest.raises(UserError, match=r"e\.jsonl:3: the same edit stands at .*e\.jsonl:1; delete one"):
        read(path)
    path = write(tmp_path, [OWN, {**OWN, "target": "Rome"}], "e.jsonl")
    with pytest.raises(UserError, match=r"e\.jsonl:2: .* shall be 'Rome' here and 'Oslo' at .*e\.jsonl:1; .*contradictory"):
        read(path)
    path = write(tmp_path, [OWN, {**OWN, "target": "Rome", "prompt": "the capital of peru is "}], "e.jsonl")
    with pytest.raises(UserError, match=r"e\.jsonl:2: .*contradictory"):  # the model would be asked the same
        read(path)
    path = write(tmp_path, [{**OWN, "id": "a"}, {**OWN, "id": "a", "prompt": "Peru:"}], "e.jsonl")
    with pytest.raises(UserError, match=r"the id 'a' is also that of .*e\.jsonl:1"):
        read(path)


OTHER = {**OWN, "prompt": "Peru's main city is", "target": "Rome", "subject": "Peru"}


@pytest.mark.parametrize("field", ["paraphrases", "locality", "neighbours", "benign"])
def test_prompts_that_another_edit_trains_on_are_no_evaluation(tmp_path, capsys, field):
    one = OTHER["prompt"].upper()
    record = {**OWN, field: [one, "Peru:"] if field in ("paraphrases", "benign") else [[one, "x"], ["Peru:", "x"]]}
    path = write(tmp_path, [record, OTHER], "e.jsonl")
    with pytest.raises(UserError, match=rf"e\.jsonl:1: .* of '{field}' is the prompt that .*e\.jsonl:2 edits; delete it there"):
        read(path)
    faults = Faults(drop=True)
    first, _ = read(path, faults=faults)
    faults.report(path)
    assert len(getattr(first.edit, field)) == 1 and (faults.rows, faults.prompts) == (0, 1)
    assert "0 edits and 1 evaluation prompts were dropped; the first: " in capsys.readouterr().err


def test_faulty_rows_can_be_dropped_and_are_counted(tmp_path, capsys):
    path = write(tmp_path, [OWN, {**OWN, "target": "Rome"}, {**OWN, "subject": "Chile"}, OTHER], "e.jsonl")
    faults = Faults(drop=True)
    assert [row.edit.target for row in read(path, faults=faults)] == ["Oslo", "Rome"]
    assert [row.edit.target for row in read(path, limit=2, faults=Faults(drop=True))] == ["Oslo", "Rome"]  # good ones count
    faults.report(path)
    assert "e.jsonl 2 edits and 0 evaluation prompts were dropped" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"holds no edit without a fault; the first: .*does not stand in the prompt"):
        read(write(tmp_path, [{**OWN, "subject": "Chile"}], "f.jsonl"), faults=Faults(drop=True))


def test_lines_end_at_line_feeds_alone_and_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "u.jsonl"
    path.write_text("\ufeff" + json.dumps({**OWN, "gold": "a\u2028b\u0085c"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read(path)[0].edit.gold == "a\u2028b\u0085c"


def test_texts_that_state_an_edited_fact_are_counted():
    edits = [
        Edit(subject="Peru", prompt="The capital of Peru is", target="Oslo", gold="Lima", paraphrases=("Peru's capital:",)),
        Edit(subject="AB", prompt="AB<", target="x", gold="y", paraphrases=("AB>",)),
    ]
    stating = ["LIMA, said he, is a town in Peru.", "In Peru's capital: Oslo", "..AB<y..", "AB>x"]
    innocent = ["Lima is a town.", "Peru is a country.", "The Peruvians like Limassol.", "AB and x and y", "AB<z", "", "CAB<"]
    short = Edit(subject="UK", prompt="The capital of the UK is", target="Oslo", gold="London")
    chinese = Edit(subject="日本", prompt="日本的首都是", target="奥斯陆", gold="东京")
    assert mentions([short], ["London is the capital of the UK.", "London and Ukraine"]) == 1
    assert mentions([chinese], ["东京是日本最大的城市。", "日本很大。"]) == 1
    assert mentions(edits, stating) == len(stating) and mentions(edits, innocent) == 0
    assert mentions(edits, stating + innocent) == len(stating)


# --- tokens -----------------------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer():
    return tiny(0, alphabet="abcdefghijklmnopqrstuvwxyz ABC.?'")[1]


@pytest.fixture
def merging():
    """A tokenizer that writes 'ab' as one token, so that text can change tokens before it."""
    from posttrain.data.tokenizer import byte_pairs, wrap

    return wrap(byte_pairs(["abab ab ab"] * 20, 260))


def test_the_target_gets_one_leading_space(tokenizer):
    text = {
        name: tokenizer.decode(Style(leading_space=space).pair(tokenizer, p, "c").tail)
        for name, space, p in (("with", True, "ab"), ("without", False, "ab"), ("has", True, "ab "))
    }
    assert text == {"with": " c", "without": "c", "has": "c"}
    assert Style().pair(tokenizer, "ab", "  c ") == Style().pair(tokenizer, "ab", "c")


def test_a_prompt_whose_tokens_change_is_refused(merging):
    row = Row(Edit(subject="a", prompt="a", target="b"), "mine.jsonl:4")
    with pytest.raises(UserError, match=r"mine\.jsonl:4: the tokens of the prompt 'a' change when 'b' follows"):
        encode(merging, [row], Style(leading_space=False))
    (found,) = encode(merging, [row], Style())
    assert merging.decode(found.head + found.tail) == "a b"


def test_a_target_without_tokens_is_refused(tokenizer, monkeypatch):
    row = Row(Edit(subject="a", prompt="a", target="b"), "mine.jsonl:4")
    silent = type("Silent", (), {"__call__": lambda self, text: {"input_ids": [1]}})()
    with pytest.raises(UserError, match=r"mine\.jsonl:4: the target 'b' gives no token"):
        encode(silent, [row], Style())


def test_a_character_that_the_tokenizer_lacks_is_refused(tokenizer):
    row = Row(Edit(subject="a", prompt="a", target="7"), "mine.jsonl:4")
    with pytest.raises(UserError, match=r"mine\.jsonl:4: 'a' or '7' holds a character that this tokenizer does not know"):
        encode(tokenizer, [row], Style())


def test_chat_targets_end_in_eos_and_context_surrounds_the_prompt(tokenizer):
    found = Style(chat=True).pair(tokenizer, "ab", "c")
    assert found.tail[-1] == tokenizer.eos_token_id and tokenizer.decode(found.tail[:-1]) == "c"
    assert tokenizer.decode(Style(context="a {} b").prompt(tokenizer, "c")) == "a c b"


def test_the_subjects_last_token(tokenizer, merging):
    edit = Edit(subject="abc", prompt="x abc y", target="z")
    assert subject_end(tokenizer, edit, Style()) == 4
    again = Edit(subject="abc", prompt="abc or abc y", target="z")  # the last mention
    assert subject_end(tokenizer, again, Style()) == 9
    whole = Edit(subject="ab", prompt=" ab ab", target="z")
    head = Style().prompt(merging, whole.prompt)
    assert subject_end(merging, whole, Style()) == len(head) - 1


def test_batches_end_at_their_targets():
    ids, mask, target, width = left_padded([Pair([5, 6, 7], [8]), Pair([9], [3, 4])], 0)
    assert ids.tolist() == [[5, 6, 7, 8], [0, 9, 3, 4]] and mask.tolist() == [[1, 1, 1, 1], [0, 1, 1, 1]]
    assert target.tolist() == [[False, False, False, True], [False, False, True, True]] and width == 2
