"""Verifiable items with disjoint train, validation and test splits.

Duplicates (same prompt after folding case, white space and punctuation) are removed across all splits before the
split is drawn; what remains of n-gram overlap between the splits is measured and reported.
"""

from __future__ import annotations

from typing import Any, Literal

from posttrain.core import cli, manifest, tables
from posttrain.core.config import JobConfig, key
from posttrain.core.determinism import derive
from posttrain.core.errors import UserError
from posttrain.data import decontamination, families, verify


class Config(JobConfig):
    kind: Literal["two_style", "addition", "reasoning"] = key(help="generator")
    train: int = key(4000, help="training items", gt=0)
    validation: int = key(256, help="validation items", gt=0)
    test: int = key(256, help="test items", gt=0)
    digits: int = key(5, help="two_style: digits per prompt; addition: digits per number", gt=0)
    own_symbols: bool = key(False, help="two_style: style B writes its own ten symbols instead of permuted digits")
    families: dict[str, dict[str, Any]] = key({}, help="reasoning: reasoning-gym family -> its options (difficulty)")
    instruction: str = key("Put the final answer in \\boxed{}.", help="reasoning: sentence added to each question")
    ngram: int = key(13, help="word n-gram length of the overlap report", gt=1)

    def model_post_init(self, _context) -> None:
        if self.families and self.kind != "reasoning":
            raise ValueError(f"families is only read with kind: reasoning, here kind is {self.kind}; remove one of them")


def answer_style(kind: str) -> verify.AnswerStyle:
    return "boxed" if kind == "reasoning" else "hash"


def generate(job: Config, count: int) -> list[dict[str, Any]]:
    seed = derive(job.seed, "tasks", job.kind)
    if job.kind == "two_style":
        symbols = families.OWN if job.own_symbols else families.permutation(derive(job.seed, "style_b"))
        return families.two_style(count, seed, length=job.digits, symbols=symbols)
    if job.kind == "addition":
        return families.addition(count, seed, digits=job.digits)
    return families.reasoning(count, seed, families=job.families, instruction=job.instruction)


def distinct(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first of each set of rows whose prompts have the same words."""
    seen: set[tuple[str, ...]] = set()
    kept = []
    for row in rows:
        words = tuple(decontamination.WORD.findall(row["prompt"].lower()))
        if words not in seen:
            seen.add(words)
            kept.append(row)
    return kept


def main(job: Config) -> None:
    sizes = {"test": job.test, "validation": job.validation, "train": job.train}
    rows = generate(job, sum(sizes.values()))
    kept = distinct(rows)
    if len(kept) < sum(sizes.values()):
        raise UserError(
            f"{job.kind}: {len(kept)} distinct items for {sum(sizes.values())} wanted; lower train, validation or test, "
            "or raise the difficulty."
        )
    style, table = answer_style(job.kind), []
    for split, size in sizes.items():
        for i in range(size):
            row = kept.pop()
            if not verify.correct(row["demonstration"], row["answer"], style):
                raise UserError(
                    f"{job.kind}: demonstration {row['demonstration']!r} does not give {row['answer']!r}; the generator is wrong."
                )
            table.append({"id": f"{split}-{i:05d}", "split": split, **row})
    file = tables.write(table, job.folder / "items.parquet")
    training = [row["prompt"] for row in table if row["split"] == "train"]
    held = [row["prompt"] for row in table if row["split"] != "train"]
    shares = decontamination.overlap(held, training, job.ngram)
    metrics = {f"items/{split}": size for split, size in sizes.items()}
    metrics |= {
        "duplicates_removed": len(rows) - len(distinct(rows)),
        "overlap/mean": sum(shares) / len(shares),
        "overlap/identical_items": sum(share == 1.0 for share in shares),
    }
    counts = {name: sum(row["family"] == name for row in table) for name in sorted({row["family"] for row in table})}
    card = {"answer_style": style, "families": counts, "example": table[0]}
    manifest.publish(job, metrics, [file], card=card)


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
