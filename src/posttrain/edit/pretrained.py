"""Edits of a pretrained model: the job of posttrain.edit.crispedit, but its result lies under seed 0 alone.

No seed of the study changes a pretrained model's weights, and its arms cost as much as a whole from-scratch world.
"""

from __future__ import annotations

from posttrain.core import cli
from posttrain.edit import crispedit


class Config(crispedit.Config):
    """The keys of posttrain.edit.crispedit."""


def main(job: Config) -> None:
    crispedit.main(job)


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
