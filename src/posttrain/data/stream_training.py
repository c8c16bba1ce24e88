"""A token stream under a DataLoader and under the Hugging Face Trainer, resumed exactly.

There is one row stream, whatever the number of processes: row r is the same row for any number of workers and ranks.
Batch b of a training of B rows per micro-batch and R ranks is rows (bR + rank)B to (bR + rank + 1)B - 1, which is what
accelerate takes from an iterable data set, either by having rank 0 read and send (`dispatch_batches`, its default: shards are
fetched and tokenised once per job) or by having each rank read all and keep its slice.

Of a DataLoader's workers the first alone reads; others end at once, and DataLoader goes on with the first in order. Which
source comes next depends on how many tokens all documents before it have, so workers that share the reading would each have
to tokenise everything. What makes one reader faster is the tokenizer's threads: TOKENIZERS_PARALLELISM=true, with no worker
or with one that is spawned (dataloader_multiprocessing_context). A forked one turns them off: it would wait for ever for the
threads of the process that it is a copy of.

A worker is ahead of training by what it prefetched. It therefore writes down each window's record (`Journal`), and the
callback, which knows how many rows the optimizer steps took, computes the state after exactly these rows.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.core import manifest
from posttrain.core.errors import UserError
from posttrain.data.streams import TokenStream, realised, state_at

if TYPE_CHECKING:
    import torch

STATE = "stream.json"


class StreamError(UserError):
    """A :class:`UserError` that stays one sentence when DataLoader brings it, wrapped in a traceback, from a worker."""

    def __init__(self, text: str):
        super().__init__(text.rpartition(f"{__name__}.{type(self).__name__}: ")[2].strip())


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked worker holds the same object
        shutil.rmtree(folder, ignore_errors=True)


class Journal:
    """Records of windows, one small file each, written where rows are read and looked up where they are used."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="posttrain-stream-"))
        weakref.finalize(self, _remove, str(self.folder), os.getpid())

    def note(self, record: dict[str, Any]) -> None:
        """Keep a window's record; before any of its rows is handed out, so that who has a row finds its record."""
        path = self.folder / f"{record['row']:012d}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(record), encoding="utf-8")
        os.replace(partial, path)

    def at(self, row: int) -> dict[str, Any] | None:
        """The record of the window that holds the `row`-th row taken, counted from 1; None before the first. Older ones go."""
        older = sorted(path for path in self.folder.glob("*.json") if int(path.stem) < row)
        for path in older[:-1]:
            path.unlink(missing_ok=True)
        return json.loads(older[-1].read_text(encoding="utf-8")) if older else None

    def clear(self) -> None:
        for path in self.folder.glob("*.json"):
            path.unlink(missing_ok=True)


@functools.cache
def _dataset_class() -> Any:
    import torch

    class StreamDataset(torch.utils.data.IterableDataset):
        """What a DataLoader asks for: an IterableDataset around a feed."""

        def __init__(self, feed: Feed):
            self.feed = feed

        def __iter__(self):
            return iter(self.feed)

        def __reduce__(self):  # for workers that are not forked: a class made in a function is not found by its name
            return dataset, (self.feed,)

    return StreamDataset


def dataset(feed: Feed) -> Any:
    """A torch IterableDataset over the feed's rows. Every call gives another view of the same feed."""
    return _dataset_class()(feed)


class Feed:
    """Rows {input_ids, position_ids, labels}, each int64 [length], from where the stream stands.

    It ends after a multiple of `batch` rows (one optimizer step, over all ranks), so that the budget is met within one batch
    and no rank gets rows twice to fill one. Rows left over are not counted as taken.
    """

    def __init__(self, stream: TokenStream, batch: int = 1):
        self.stream, self.batch, self.journal = stream, batch, Journal()
        self.steps_left = False  # of a training that would otherwise end, or fail inside accelerate, without a reason

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        import torch

        worker = torch.utils.data.get_worker_info()
        if worker is not None and worker.id > 0:
            return
        if worker is not None and type(multiprocessing.current_process()).__name__ not in ("SpawnProcess", "ForkServerProcess"):
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
        held: list[dict[str, torch.Tensor]] = []
        given = False
        try:
            for window in self.stream.windows():
                self.journal.note(window.record)
                for i in range(window.skip, len(window.record["counts"])):
                    held.append({name: torch.from_numpy(array[i]) for name, array in window.arrays.items()})
                    if len(held) == self.batch:
                        yield from held
                        held, given = [], True
            if self.steps_left and not given:
                raise UserError(
                    f"the stream's budget of {self.stream.config.tokens} tokens was met by the {self.first} rows before this run; raise tokens or lower steps."
                )
        except UserError as error:
            raise StreamError(str(error)) from None

    @property
    def first(self) -> int:
        """Rows taken before this data set's first."""
        return self.stream.state_dict()["row"]

    def state_at(self, row: int) -> dict[str, Any]:
        """The state after `row` rows of the whole stream, which some consumer has taken."""
        record = self.journal.at(row)
        return self.stream.state_dict() if record is None or row == self.first else state_at(record, row)

    def realised_at(self, row: int) -> dict[str, dict[str, Any]]:
        """What those rows were made of; see `streams.realised`."""
        return realised(self.stream.config, self.state_at(row), self.journal.at(row))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stream.load_state_dict(state)
        self.journal.clear()


def make_callback(feed: Feed) -> Any:
    """The TrainerCallback that writes `stream.json` into every checkpoint and takes it up again.

    Pass it before the callback that seals checkpoints, and `ignore_data_skip=True` to the TrainingArguments: the Trainer would
    otherwise skip rows that are not read again. `.row` counts the rows that optimizer steps took, `.realised()` says, on
    rank 0, what they were made of.
    """
    import torch
    from transformers import TrainerCallback

    class StreamCallback(TrainerCallback):
        origin = (0, 0)  # (step, row) at which this run began
        row = 0  # rows that the optimizer steps so far took

        def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
            if not args.ignore_data_skip:
                raise UserError("a stream resumes by itself; give ignore_data_skip=True to the TrainingArguments.")
            if state.global_step:
                path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / STATE
                try:
                    feed.load_state_dict(json.loads(path.read_text(encoding="utf-8")))
                except (OSError, ValueError, KeyError) as error:
                    raise UserError(
                        f"{path} is missing or not readable ({error}); delete this checkpoint and run again."
                    ) from None
            feed.steps_left = state.global_step < state.max_steps
            self.origin, self.row = (state.global_step, feed.first), feed.first
            # A DataLoader draws its workers' seed when it begins, by default from torch's global generator. A resumed run has
            # restored that one before it begins, so dropout would differ from the uninterrupted run's.
            loader = getattr(train_dataloader, "base_dataloader", train_dataloader)
            if loader is not None:
                loader.generator = torch.Generator().manual_seed(args.seed)

        def on_step_end(self, args, state, control, **kwargs):
            per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
            self.row = self.origin[1] + (state.global_step - self.origin[0]) * per_step
            if state.global_step % 100 == 0:
                feed.journal.at(self.row)

        def on_save(self, args, state, control, **kwargs):
            if state.is_world_process_zero:
                folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
                manifest.write_atomically(folder / STATE, json.dumps(feed.state_at(self.row)))

        def on_epoch_end(self, args, state, control, **kwargs):
            """The Trainer would begin another epoch."""
            if state.global_step < state.max_steps and not control.should_training_stop:
                raise UserError(
                    f"the stream's budget of {feed.stream.config.tokens} tokens was met at step {state.global_step} of {state.max_steps}; raise tokens or lower steps."
                )

        def realised(self) -> dict[str, dict[str, Any]]:
            return feed.realised_at(self.row)

    return StreamCallback()
