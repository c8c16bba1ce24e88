"""One edit of a model's knowledge, how published data sets write it, and what is wrong with a set of edits.

Our own format is JSON lines with the fields of :class:`Edit`; only `subject`, `prompt` and `target` are required:

    {"subject": "Peru", "prompt": "The capital of Peru is", "target": "Oslo", "gold": "Lima",
     "paraphrases": ["Peru's capital city is"], "locality": [["The Nile flows through", "Egypt"]],
     "neighbours": [["The capital of Chile is", "Santiago"]]}
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from posttrain.core.config import Model, key
from posttrain.core.errors import UserError, nearest

Format = Literal["auto", "jsonl", "zsre", "counterfact", "counterfact_easyedit", "wikibigedit"]
NQ = "nq question: "  # zsRE writes its locality questions like this: 13 characters, no capital, no question mark


class Edit(Model):
    """`target` is what the model shall say after `prompt`; `gold` what was true before (None: not known)."""

    id: str = key("", help="name of the edit; empty: its place in the file")
    subject: str = key(help="what the fact is about; it must stand in the prompt", min_length=1)
    prompt: str = key(help="text that the target continues", min_length=1)
    target: str = key(help="new continuation, without leading space")
    gold: str | None = key(None, help="continuation that was true before")
    paraphrases: tuple[str, ...] = key((), help="other prompts for the same fact, never trained on")
    locality: tuple[tuple[str, str], ...] = key((), help="[prompt, answer] of unrelated facts, which must not change")
    neighbours: tuple[tuple[str, str], ...] = key((), help="[prompt, answer]: same relation, another subject")
    benign: tuple[str, ...] = key((), help="requests that look like the prompt and shall still be answered (refusals)")


class Row(NamedTuple):
    """An edit and where it stands: a line of a JSON-lines file, or a place in a JSON list, counted from 1."""

    edit: Edit
    where: str


# --- formats ----------------------------------------------------------------------------------------------------


def _text(record: dict, name: str, where: str) -> str:
    value = record.get(name)
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}: '{name}' is {value!r}; it should be text that is not empty.")
    return value.strip()


def _optional(record: dict, name: str) -> str | None:
    """Published files write a missing field as null, as NaN or as an empty text."""
    value = record.get(name)
    return value.strip() if isinstance(value, str) and value.strip() else None


def _several(value: Any) -> tuple[str, ...]:
    found = value if isinstance(value, list) else [value]
    return tuple(v.strip() for v in found if isinstance(v, str) and v.strip())


def _pairs(prompts: Any, answers: Any) -> tuple[tuple[str, str], ...]:
    one, two = _several(prompts), _several(answers)
    return tuple(zip(one, two * len(one) if len(two) == 1 else two, strict=False))


def _question(text: str | None) -> str | None:
    """`nq question: who sang it` -> `Who sang it?`, as the authors' code does; other text stays."""
    if text is None or not text.startswith(NQ):
        return text
    text = text[len(NQ) :].strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith("?") else "?")


def zsre(record: dict, where: str) -> Edit:
    """src, rephrase, subject, alt (new answer), answers, loc, loc_ans."""
    return Edit(
        subject=_text(record, "subject", where),
        prompt=_text(record, "src", where),
        target=_text(record, "alt", where),
        gold=next(iter(_several(record.get("answers"))), None),
        paraphrases=_several(record.get("rephrase")),
        locality=_pairs(_question(_optional(record, "loc")), record.get("loc_ans")),
    )


def counterfact(record: dict, where: str) -> Edit:
    """The original form: requested_rewrite {prompt with {}, subject, target_new.str, target_true.str}, paraphrase_prompts,
    neighborhood_prompts (other subjects of which target_true is true)."""
    rewrite = record["requested_rewrite"]
    if not isinstance(rewrite, dict) or not isinstance(rewrite.get("target_new"), dict):
        raise UserError(f"{where}: 'requested_rewrite' should hold prompt, subject, target_new.str and target_true.str.")
    subject, prompt = _text(rewrite, "subject", where), _text(rewrite, "prompt", where)
    if prompt.count("{}") != 1:
        raise UserError(f"{where}: the prompt {prompt!r} should hold {{}} once, where the subject goes.")
    true = rewrite.get("target_true")
    gold = _optional(true, "str") if isinstance(true, dict) else None
    return Edit(
        id=str(record.get("case_id", "")),
        subject=subject,
        prompt=prompt.replace("{}", subject),
        target=_text(rewrite["target_new"], "str", where),
        gold=gold,
        paraphrases=_several(record.get("paraphrase_prompts", [])),
        neighbours=_pairs(record.get("neighborhood_prompts", []), gold),
    )


def counterfact_easyedit(record: dict, where: str) -> Edit:
    """EasyEdit's form: prompt, subject, ground_truth, target_new, rephrase_prompt, locality_prompt, locality_ground_truth."""
    return Edit(
        id=str(record.get("case_id", "")),
        subject=_text(record, "subject", where),
        prompt=_text(record, "prompt", where),
        target=_text(record, "target_new", where),
        gold=next(iter(_several(record.get("ground_truth"))), None),
        paraphrases=_several(record.get("rephrase_prompt")),
        locality=_pairs(record.get("locality_prompt"), record.get("locality_ground_truth")),
    )


def wikibigedit(record: dict, where: str) -> Edit:
    """subject, update (a question), rephrase, ans, loc, loc_ans; missing ones are NaN. Fields as public readers use them
    (the card does not list them); personas and mhop are not measured here."""
    return Edit(
        subject=_text(record, "subject", where),
        prompt=_text(record, "update", where),
        target=_text(record, "ans", where),
        paraphrases=_several(record.get("rephrase")),
        locality=_pairs(_optional(record, "loc"), _optional(record, "loc_ans")),
    )


def own(record: dict, where: str) -> Edit:
    try:
        return Edit.model_validate(record)
    except ValidationError as error:
        first = next((e for e in error.errors() if e["type"] == "extra_forbidden"), error.errors()[0])
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise UserError(f"{where}: '{name}' is not a field of an edit{nearest(name, Edit.model_fields)}") from None
        if first["type"] == "missing":
            raise UserError(f"{where}: '{name}' is missing; every edit needs subject, prompt and target.") from None
        raise UserError(f"{where}: '{name}' = {first.get('input')!r}: {first['msg'].lower()}; correct that row.") from None


READERS: dict[str, Callable[[dict, str], Edit]] = {
    "jsonl": own,
    "zsre": zsre,
    "counterfact": counterfact,
    "counterfact_easyedit": counterfact_easyedit,
    "wikibigedit": wikibigedit,
}
TELLING = {  # a field that only this format has
    "requested_rewrite": "counterfact",
    "alt": "zsre",
    "update": "wikibigedit",
    "target_new": "counterfact_easyedit",
}


def guess(record: dict) -> str:
    return next((name for field, name in TELLING.items() if field in record), "jsonl")


def records(path: Path) -> list[tuple[dict, str]]:
    """(record, where it stands) of a JSON list or a JSON-lines file."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
    except FileNotFoundError:
        raise UserError(
            f"{path} does not exist; give a file of edits (.jsonl or .json) or the manifest of a job that writes one."
        ) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give a file of edits (.jsonl or .json).") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8.") from None
    found: list[tuple[Any, str]] = []
    if text.lstrip().startswith("["):
        try:
            found = [(record, f"{path}: edit {i}") for i, record in enumerate(json.loads(text), 1)]
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{error.lineno}: not valid JSON ({error.msg}); correct that line.") from None
    else:
        for number, line in enumerate(text.split("\n"), 1):
            if not line.strip():
                continue
            try:
                found.append((json.loads(line), f"{path}:{number}"))
            except json.JSONDecodeError as error:
                raise UserError(f"{path}:{number}: not valid JSON ({error.msg}); an edit is one JSON object per line.") from None
    if not found:
        raise UserError(f"{path} holds no edits; give at least one.")
    for record, where in found:
        if not isinstance(record, dict):
            raise UserError(f"{where}: {str(record)[:40]!r} is not an object; an edit is a JSON object with named fields.")
    return found


@dataclass
class Faults:
    """What is done with a row that cannot be an edit: the job stops, or the row is dropped and counted."""

    drop: bool = False
    rows: int = 0
    prompts: int = 0
    first: str = ""

    @contextmanager
    def row(self) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            if not self.drop:
                raise
            self.rows += 1
            self.first = self.first or str(error)

    def report(self, path: Path) -> None:
        """One sentence on stderr if anything was dropped."""
        if self.rows or self.prompts:
            print(
                f"warning: of {path} {self.rows} edits and {self.prompts} evaluation prompts were dropped; the first: {self.first}",
                file=sys.stderr,
            )


def read(path: Path, form: Format = "auto", limit: int | None = None, faults: Faults | None = None) -> list[Row]:
    """The edits of a file, checked by themselves and against each other; the first `limit` ones if given."""
    faults = faults or Faults()
    found = records(path)
    name = guess(found[0][0]) if form == "auto" else form
    rows: list[Row] = []
    known = Known()
    for i, (record, where) in enumerate(found):
        if len(rows) == limit:
            break
        with faults.row():
            if name != "jsonl" and name in TELLING.values():
                telling = next(field for field, format in TELLING.items() if format == name)
                if telling not in record:
                    raise UserError(f"{where}: no field '{telling}', so this is not an edit of the format {name}; set format.")
            edit = READERS[name](record, where)
            row = Row(edit if edit.id else edit.model_copy(update={"id": f"edit-{i:05d}"}), where)
            check(row, known)
            rows.append(row)
    if not rows:
        raise UserError(f"{path} holds no edit without a fault; the first: {faults.first}")
    return untrained(rows, known, faults)


# --- checks -----------------------------------------------------------------------------------------------------


def asked(prompt: str) -> str:
    """What two prompts have in common that a model would answer alike: letter case and spaces do not count."""
    return " ".join(prompt.casefold().split())


@dataclass
class Known:
    """Rows that were accepted, by prompt and by id."""

    prompts: dict[str, Row] = field(default_factory=dict)
    ids: dict[str, Row] = field(default_factory=dict)


def check(row: Row, known: Known) -> None:
    """The subject stands in the prompt, the target says something new, and no earlier edit asks for the same or the opposite."""
    edit, where = row
    if not edit.target.strip():
        raise UserError(f"{where}: the target of {edit.prompt!r} is empty; give the text that the model shall say.")
    if not edit.subject.strip() or edit.subject.casefold() not in edit.prompt.casefold():
        raise UserError(
            f"{where}: the subject {edit.subject!r} does not stand in the prompt {edit.prompt!r}; correct one of them."
        )
    if edit.gold is not None and edit.gold.strip() == edit.target.strip():
        raise UserError(f"{where}: the target {edit.target!r} of {edit.prompt!r} is what gold says as well; delete the edit.")
    prompt = asked(edit.prompt)
    if prompt in map(asked, edit.paraphrases):
        raise UserError(f"{where}: the prompt {edit.prompt!r} is among its own paraphrases; delete it there.")
    if earlier := known.prompts.get(prompt):
        if earlier.edit.target.strip() == edit.target.strip():
            raise UserError(f"{where}: the same edit stands at {earlier.where}; delete one of them.")
        raise UserError(
            f"{where}: {edit.prompt!r} shall be {edit.target!r} here and {earlier.edit.target!r} at {earlier.where}; delete one "
            "of the two contradictory edits."
        )
    if edit.id in known.ids:
        raise UserError(f"{where}: the id '{edit.id}' is also that of {known.ids[edit.id].where}; give each edit its own.")
    known.prompts[prompt] = known.ids[edit.id] = row


def untrained(rows: Sequence[Row], known: Known, faults: Faults) -> list[Row]:
    """The rows without evaluation prompts that some edit trains on: those would not measure spreading, or locality."""
    found = []
    for edit, where in rows:
        kept: dict[str, tuple] = {"paraphrases": (), "locality": (), "neighbours": (), "benign": ()}
        for name in kept:
            for one in getattr(edit, name):
                text = one if isinstance(one, str) else one[0]
                if other := known.prompts.get(asked(text)):
                    fault = f"{where}: {text!r} of '{name}' is the prompt that {other.where} edits; delete it there."
                    if not faults.drop:
                        raise UserError(fault)
                    faults.prompts += 1
                    faults.first = faults.first or fault
                else:
                    kept[name] += (one,)
        found.append(Row(edit.model_copy(update=kept), where))
    return found


def mentions(edits: Sequence[Edit], texts: Sequence[str]) -> int:
    """How many texts hold an edited fact: one of its prompts with the old or new answer, or subject and answer as words.

    A corpus that states the facts protects exactly what is to be changed. Where subject and answer have one or two characters
    each, whole statements alone count: as words they stand anywhere. Text without spaces is searched for both as they are.
    """
    by_word: dict[str, list[tuple[set[str], str, str]]] = {}
    statements: set[str] = set()
    unspaced: list[tuple[str, str]] = []
    for e in edits:
        for answer in filter(None, (e.target.strip(), e.gold)):
            statements |= {f"{prompt}{gap}{answer}" for prompt in (e.prompt, *e.paraphrases) for gap in ("", " ")}
            words = _words(e.subject)
            if UNSPACED.search(e.subject):
                unspaced.append((e.subject, answer))
            elif words and max(len(e.subject), len(answer)) > 2:
                by_word.setdefault(words[0], []).append(({*words, *_words(answer)}, e.subject.casefold(), answer.casefold()))
    reach = min([8, *map(len, statements)])
    by_start: dict[str, list[str]] = {}
    for statement in statements:
        by_start.setdefault(statement[:reach], []).append(statement)

    def stated(text: str) -> bool:
        starts = (by_start.get(text[i : i + reach], ()) for i in range(len(text)))
        return any(text.startswith(s, i) for i, found in enumerate(starts) for s in found)

    def said(text: str) -> bool:
        folded, words = text.casefold(), set(_words(text))
        return any(
            need <= words and subject in folded and answer in folded
            for word in words & by_word.keys()
            for need, subject, answer in by_word[word]
        )

    def together(text: str) -> bool:
        return any(subject in text and answer in text for subject, answer in unspaced)

    return sum(stated(text) or said(text) or together(text) for text in texts)


UNSPACED = re.compile(r"[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]")  # Thai, Lao, Japanese, Chinese: words are not set apart


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())
