"""Streams: the rows of an interrupted run are those of the whole one, shares are met, nothing is dropped in silence."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core import config as configs
from posttrain.core.errors import UserError
from posttrain.core.manifest import sha256
from posttrain.data import stream_sources, streams, tokenizer
from posttrain.data.packing import IGNORE
from posttrain.data.stream_reader import cut
from posttrain.data.stream_sources import StreamSource
from posttrain.data.stream_training import Feed, StreamError, dataset, make_callback
from posttrain.data.streams import StreamConfig, TokenStream

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 \n:;UA?."
TOKENIZER = tokenizer.wrap(tokenizer.characters(LETTERS))
EOS = TOKENIZER.eos_token_id


def write(path: Path, rows: list[dict]) -> Path:
    """Rows as parquet in small row groups, or jsonl, by the ending of `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        table = pa.Table.from_pylist(rows) if rows else pa.table({"text": pa.array([], pa.string())})
        pq.write_table(table, path, row_group_size=7)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(name: str, count: int, longest: int) -> list[str]:
    """Distinct texts, `<name><number><filling>`, of 4 to `longest` characters."""
    rng = random.Random(name)
    return [f"{name}{i:03d}" + "".join(rng.choices("xyz ", k=rng.randint(0, longest - 4))) + "." for i in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """a: 3 parquet shards of short texts; b: 2 jsonl shards of long ones; c: 1 parquet shard of few."""
    root = tmp_path_factory.mktemp("shards")
    for name, shards, rows, longest, ending in (("a", 3, 11, 14, "parquet"), ("b", 2, 5, 60, "jsonl"), ("c", 1, 4, 9, "parquet")):
        found = texts(name, shards * rows, longest)
        for i in range(shards):
            write(root / name / f"{i}.{ending}", [{"text": t, "other": i} for t in found[i * rows : (i + 1) * rows]])
    return root


def build(folder: Path, shares: dict[str, float], **values) -> StreamConfig:
    sources = {name: {"share": share, "path": folder / name, "text": "text"} for name, share in shares.items()}
    return StreamConfig(**{"sources": sources, "tokens": 1500, "length": 16, "window": 6, "block": 4, **values})


SHARES = {1: {"a": 1.0}, 2: {"a": 0.6, "b": 0.4}, 3: {"a": 0.5, "b": 0.3, "c": 0.2}}


def stream(config: StreamConfig, seed: int = 0) -> TokenStream:
    return TokenStream(config, TOKENIZER, seed)


def equal(a, b) -> bool:
    assert len(a) == len(b)
    return all(x.keys() == y.keys() and all(np.array_equal(x[k], y[k]) for k in x) for x, y in zip(a, b, strict=True))


def documents(rows) -> list[str]:
    """The text of every run of positions from 0 on, padding left out."""
    found = []
    for row in rows:
        starts = [*np.flatnonzero(row["position_ids"] == 0), len(row["position_ids"])]
        for a, b in itertools.pairwise(starts):
            ids, labels = row["input_ids"][a:b], row["labels"][a:b]
            if ids[0] != TOKENIZER.pad_token_id:
                assert labels[0] == IGNORE and np.array_equal(labels[1:], ids[1:])
                found.append(TOKENIZER.decode(ids).replace("<eos>", ";"))
            else:
                assert (labels == IGNORE).all() and b == len(row["position_ids"])
    return found


def through(state) -> dict:
    return json.loads(json.dumps(state))


# --- exact resume ---------------------------------------------------------------------------------------------


def batches(feed: Feed, workers: int, size: int = 4):
    return torch.utils.data.DataLoader(dataset(feed), batch_size=size, num_workers=workers)


CASES = [(0, p, n) for p in (True, False) for n in (1, 2, 3)] + [(1, True, 3), (2, True, 2), (2, False, 3)]


@pytest.mark.parametrize(("workers", "packed", "count"), CASES)
def test_stopped_after_any_batch_the_rest_is_the_same(folder, workers, packed, count):
    config = build(folder, SHARES[count], packing=packed, tokens=1200 if workers == 0 else 700)
    whole = list(batches(Feed(stream(config), 4), 0))
    feed, states = Feed(stream(config), 4), []
    states.append(through(feed.state_at(0)))
    for n, batch in enumerate(batches(feed, workers), 1):
        assert equal([batch], [whole[n - 1]])  # any number of workers gives the same batches
        states.append(through(feed.state_at(4 * n)))
    assert len(states) == len(whole) + 1 > 8 and [s["row"] for s in states] == list(range(0, 4 * len(states), 4))
    assert max(len(json.dumps(s)) for s in states) < 4000
    for n, state in enumerate(states):
        resumed = Feed(stream(config), 4)
        resumed.load_state_dict(state)
        assert equal(list(batches(resumed, workers)), whole[n:])
    assert max(s["epochs"] for s in feed.realised_at(4 * len(whole)).values()) > 1  # some source came again


def test_states_of_a_resumed_run_are_those_of_the_whole_one(folder):
    config = build(folder, SHARES[3])
    one = stream(config)
    states = [through(one.state_dict())] + [through(one.state_dict()) for _ in one]
    for start in range(0, len(states), 9):
        again = stream(config)
        again.load_state_dict(states[start])
        assert again.state_dict() == states[start]
        assert [through(again.state_dict()) for _ in again] == states[start + 1 :]


def test_a_second_stop_soon_after_the_first(folder):
    config = build(folder, SHARES[2], tokens=500)
    whole, state, taken = list(stream(config)), stream(config).state_dict(), []
    for _ in whole:
        one = stream(config)
        one.load_state_dict(through(state))
        taken += itertools.islice(one, 1)
        state = one.state_dict()
    assert equal(taken, whole)
    one.load_state_dict(state)
    assert not list(one)


def test_prefetched_rows_do_not_count(folder):
    """The worker reads far ahead; the state is that of the rows that were taken."""
    config = build(folder, SHARES[3])
    feed = Feed(stream(config), 4)
    loader = torch.utils.data.DataLoader(dataset(feed), batch_size=4, num_workers=1, prefetch_factor=50)
    iterator = iter(loader)
    first = next(iterator)
    deadline = time.monotonic() + 20
    while len(list(feed.journal.folder.glob("*.json"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    state = feed.state_at(4)
    assert len(list(feed.journal.folder.glob("*.json"))) >= 3 and state["row"] == 4
    rest = Feed(stream(config), 4)
    rest.load_state_dict(through(state))
    assert equal([first, *batches(rest, 0)], list(batches(Feed(stream(config), 4), 0)))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_worker_of_a_process_whose_tokenizer_has_threads(folder, monkeypatch, method):
    """A forked worker must not wait for threads that it does not have; a spawned one has to be able to unpickle the feed."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    TOKENIZER(["abc"] * 64)  # starts the threads
    config = build(folder, SHARES[2], tokens=300)
    whole = list(batches(Feed(stream(config), 4), 0))
    loader = torch.utils.data.DataLoader(
        dataset(Feed(stream(config), 4)), batch_size=4, num_workers=2, timeout=60, multiprocessing_context=method
    )
    assert equal(list(loader), whole)


@pytest.mark.parametrize("workers", [0, 1])
def test_ranks_take_their_slices_and_resume(folder, workers):
    """As accelerate divides an iterable data set: row r of step b on rank k is row (2b + k)B + r of the stream."""
    from accelerate.data_loader import IterableDatasetShard

    config = build(folder, SHARES[3], tokens=400)
    rows = list(stream(config))

    def ranks(state=None):
        found = []
        for rank in (0, 1):
            feed = Feed(stream(config), 6)
            if state:
                feed.load_state_dict(state)
            shard = IterableDatasetShard(dataset(feed), 3, False, 2, rank)
            found.append([*torch.utils.data.DataLoader(shard, batch_size=3, num_workers=workers)])
        return found

    whole = ranks()
    for step, pair in enumerate(zip(*whole, strict=True)):
        for rank, batch in enumerate(pair):
            part = rows[(2 * step + rank) * 3 :][:3]
            assert torch.equal(batch["input_ids"], torch.stack([torch.from_numpy(r["input_ids"]) for r in part]))
    one = stream(config)
    for taken, _ in enumerate(one, 1):
        if taken % 6 == 0 and taken <= 6 * len(whole[0]):
            rest = ranks(through(one.state_dict()))
            assert all(equal(mine, all_of[taken // 6 :]) for mine, all_of in zip(rest, whole, strict=True))


def test_resume_opens_the_current_shard_at_the_current_block(folder, monkeypatch):
    config = build(folder, {"a": 1.0}, tokens=260)
    one = stream(config)
    rows = iter(one)
    while not one.state_dict()["base"]["sources"]["a"]["rows"]:  # until the first shard is behind
        next(rows)
    state, opened = one.state_dict(), []
    tables = stream_sources.Shards.tables
    monkeypatch.setattr(
        stream_sources.Shards,
        "tables",
        lambda self, shard, row, block: opened.append((shard, row)) or tables(self, shard, row, block),
    )
    again = stream(config)
    again.load_state_dict(state)
    list(again)
    finished, cursor = set(map(int, state["base"]["sources"]["a"]["rows"])), state["base"]["sources"]["a"]
    assert opened[0] not in [(s, 0) for s in finished] and not finished & {shard for shard, _ in opened[:1]}
    assert opened[0][1] == cursor["row"] and all(row == 0 for _, row in opened[1:])


@given(
    st.lists(st.lists(st.text("abc ", max_size=30), min_size=1, max_size=9), min_size=1, max_size=3),
    st.integers(2, 20), st.integers(1, 5), st.integers(1, 5), st.booleans(), st.integers(0, 3), st.data(),
)  # fmt: skip
@settings(max_examples=25)
def test_one_pass_holds_every_document_once(tmp_path_factory, shards, length, window, block, packed, seed, data):
    root = tmp_path_factory.mktemp("one")
    for i, shard in enumerate(shards):
        write(root / "s" / f"{i}.parquet", [{"text": text} for text in shard])
    found = [text for shard in shards for text in shard if text.strip()]
    tokens = sum(len(text) + 1 for text in found)
    sources = {"s": {"share": 1, "path": root / "s", "text": "text", "when_exhausted": "refuse"}}
    if not found:
        sources["s"]["when_exhausted"] = "repeat"
        with pytest.raises(UserError, match=r"no row of .* is left"):
            list(stream(StreamConfig(sources=sources, tokens=1, length=length)))
        return
    config = StreamConfig(sources=sources, tokens=tokens, length=length, window=window, block=block, packing=packed)
    one = stream(config, seed)
    rows, states = [], [through(one.state_dict())]
    for row in one:
        rows.append(row)
        states.append(through(one.state_dict()))
    pieces = [(text + ";")[i : i + length] for text in found for i in range(0, len(text) + 1, length)]
    assert Counter(documents(rows)) == Counter(pieces)
    assert one.realised()["s"]["tokens"] == tokens and one.realised()["s"]["documents"] == len(found)
    at = data.draw(st.integers(0, len(rows)))
    again = stream(config, seed)
    again.load_state_dict(states[at])
    assert equal(list(again), rows[at:]) and again.realised() == one.realised()


# --- through the Trainer --------------------------------------------------------------------------------------


def trained(config: StreamConfig, output: Path, workers: int, stop: int | None = None, resume: int | None = None, steps: int = 5):
    """(loss, gradient norm and rate of each step, weights, callback) of a model with dropout; `stop`: saved and left there."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(TOKENIZER), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            attention_dropout=0.3, use_cache=False,
        )
    )  # fmt: skip
    if resume is not None:
        set_seed(99)  # what a restarted process would have is of no account

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == stop:
                control.should_save = control.should_training_stop = True

    args = TrainingArguments(
        output_dir=str(output), max_steps=steps, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1,
        learning_rate=1e-2, save_strategy="no", seed=0, use_cpu=True, report_to="none", disable_tqdm=True,
        dataloader_num_workers=workers, remove_unused_columns=False, ignore_data_skip=True,
    )  # fmt: skip
    feed = Feed(stream(config), 4 * args.world_size)
    callback = make_callback(feed)
    trainer = Trainer(model=model, args=args, train_dataset=dataset(feed), callbacks=[callback, Stop()])
    trainer.train(resume_from_checkpoint=str(output / f"checkpoint-{resume}") if resume else None)
    history = [(e["step"], e["loss"], e["grad_norm"], e["learning_rate"]) for e in trainer.state.log_history if "loss" in e]
    return history, torch.cat([p.detach().flatten() for p in model.parameters()]), callback


@pytest.mark.parametrize(("workers", "stops"), [(0, (1, 2, 3, 4)), (2, (3,))])
def test_trainer_stopped_and_resumed_is_the_uninterrupted_one_bit_by_bit(folder, tmp_path, workers, stops):
    config = build(folder, SHARES[3])
    whole, weights, callback = trained(config, tmp_path / "whole", 0)
    assert len(whole) == 5 == len({loss for _, loss, _, _ in whole})
    for stop in stops:
        begun, _, _ = trained(config, tmp_path / str(stop), workers, stop=stop)
        written = json.loads((tmp_path / str(stop) / f"checkpoint-{stop}" / "stream.json").read_text())
        assert len(begun) == stop and written["row"] == 4 * stop
        history, again, resumed = trained(config, tmp_path / str(stop), workers, resume=stop)
        assert history == whole and torch.equal(again, weights)
        assert resumed.realised() == callback.realised()
    assert callback.realised()["a"]["tokens"] > 0 and callback.row == 20


RANKS = """
import json, sys
from pathlib import Path
from accelerate import PartialState
from tests.data.test_streams import SHARES, build, torch, trained
folder, out = map(Path, sys.argv[1:3])
config = build(folder, SHARES[3])
whole, weights, callback = trained(config, out / "whole", 0)
trained(config, out / "cut", 1, stop=2)
history, again, resumed = trained(config, out / "cut", 1, resume=2)
state = PartialState()
same = [history == whole, torch.equal(weights, again)]
if state.is_main_process:
    same.append(resumed.realised() == callback.realised())
    (out / "found.json").write_text(json.dumps([state.num_processes, same, callback.row, whole]))
assert all(same), (state.process_index, same)
state.destroy_process_group()
"""


@pytest.mark.slow
def test_trainer_of_two_processes_resumes_bit_by_bit(folder, tmp_path):
    (tmp_path / "ranks.py").write_text(RANKS)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": os.pathsep.join(sys.path)}
    words += [str(tmp_path / "ranks.py"), str(folder), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    processes, same, row, history = json.loads((tmp_path / "found.json").read_text())
    assert (processes, same, row, len(history)) == (2, [True, True, True], 40, 5)


def test_trainer_stops_with_a_sentence_where_the_budget_ends(folder, tmp_path):
    config = build(folder, SHARES[3], tokens=200)
    with pytest.raises(
        UserError, match=r"^the stream's budget of 200 tokens was met at step 3 of 5; raise tokens or lower steps\.$"
    ):
        trained(config, tmp_path / "run", 0)
    trained(config, tmp_path / "two", 0, stop=3)
    with pytest.raises(
        UserError, match=r"^the stream's budget of 200 tokens was met by the 12 rows before this run; raise"
    ):  # nothing is left at all
        trained(config, tmp_path / "two", 0, resume=3)


def test_trainer_that_would_skip_is_refused(folder, tmp_path):
    from transformers import TrainingArguments

    callback = make_callback(Feed(stream(build(folder, SHARES[1]))))
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(UserError, match="give ignore_data_skip=True"):
        callback.on_train_begin(args, None, None)


def test_checkpoint_without_its_stream_is_named(folder, tmp_path):
    config = build(folder, SHARES[1])
    trained(config, tmp_path, 0, stop=2)
    (tmp_path / "checkpoint-2" / "stream.json").unlink()
    with pytest.raises(UserError, match=r"checkpoint-2/stream\.json is missing or not readable .*; delete this checkpoint"):
        trained(config, tmp_path, 0, resume=2)


# --- shares and budget ----------------------------------------------------------------------------------------


def test_shares_within_a_percent_at_a_million_tokens(tmp_path):
    """Documents of very different lengths; at any time, no source is further than a row from its share."""
    rng = random.Random(0)
    lengths = {"long": (2000, 9000), "mid": (50, 400), "rare": (300, 900), "short": (3, 20)}
    for name, (low, high) in lengths.items():
        rows = [{"text": "a" * rng.randint(low, high)} for _ in range(60_000 // high + 9)]
        write(tmp_path / name / "0.parquet", rows)
    shares = {"long": 0.35, "mid": 0.5, "rare": 0.01, "short": 0.14}
    config = build(tmp_path, shares, tokens=1_000_000, length=512, window=64, block=256)
    one, total, padding, rows = stream(config), 0, 0, 0
    for window in one.windows():
        rows += len(window.record["counts"])
        padding += int((window.arrays["input_ids"] == TOKENIZER.pad_token_id).sum())
        held = {name: cursor["tokens"] for name, cursor in window.record["end"]["sources"].items()}
        total = sum(held.values())
        assert all(abs(held[name] - share * total) <= 512 for name, share in shares.items())
    assert total == 1_000_000 == rows * 512 - padding  # met exactly: the last piece is cut
    assert all(abs(held[name] / total - share) < 0.001 for name, share in shares.items())
    assert padding / total < 0.02


def test_budget_is_met_within_one_batch(folder):
    config = build(folder, SHARES[3])
    rows = list(stream(config))
    for batch in (1, 4, 7):
        feed = Feed(stream(config), batch)
        found = list(feed)
        assert len(found) == len(rows) // batch * batch
        tokens = sum(source["tokens"] for source in feed.realised_at(len(found)).values())
        assert tokens == sum(int((row["input_ids"] != TOKENIZER.pad_token_id).sum()) for row in found)
        assert config.tokens - 16 * batch < tokens <= config.tokens


def test_seed_gives_the_order(folder):
    config = build(folder, SHARES[3])
    assert equal(list(stream(config, 1)), list(stream(config, 1)))
    first, second = documents(stream(config, 0)), documents(stream(config, 1))
    assert first != second and set(first) & set(second)


def test_no_document_a_second_time_before_all_came_and_passes_differ(folder):
    one = stream(build(folder, {"a": 1.0}, length=32, tokens=1200, window=1, block=4))
    order = [text for text in documents(one) if text.endswith(";")]
    counts = Counter()
    for text in order:
        counts[text] += 1
        assert max(counts.values()) - min(counts.values()) <= 2
    assert len(counts) == 33 and min(counts.values()) >= 2
    realised = one.realised()["a"]
    assert realised["epochs"] == round(realised["documents"] / 33, 4) > 2
    assert order[:33] != order[33:66]


def test_rows_of_a_block_come_in_another_order_each_pass(folder):
    """One document per row and one row per window, so that rows come as documents are read."""
    order = documents(stream(build(folder, {"c": 1.0}, tokens=400, window=1, packing=False)))
    passes = {tuple(order[i : i + 4]) for i in range(0, len(order) - 4, 4)}
    assert all(len(set(one)) == 4 for one in passes) and len(passes) > 5


def test_rows_of_a_window_are_mixed(folder):
    """Best-fit decreasing puts long pieces first; batches must not come sorted by length, which is by source."""
    one = stream(build(folder, SHARES[2], window=60, tokens=1500))
    first = [len(documents([row])[0]) for row in one]
    assert first[:40] != sorted(first[:40], reverse=True)
    assert abs(np.mean(first[:30]) - np.mean(first[30:60])) < 2


def test_realised_names_shards_rows_and_content(folder):
    one = stream(build(folder, SHARES[3], tokens=3000))
    list(one)
    found = one.realised()
    assert sum(source["share"] for source in found.values()) == pytest.approx(1)
    assert [s["name"] for s in found["b"]["shards"]] == ["0.jsonl", "1.jsonl"]
    assert found["c"]["shards"] == [
        {"name": "0.parquet", "rows": 4, "complete": True, "sha256": sha256(folder / "c" / "0.parquet")}
    ]
    assert all(shard["complete"] and shard["rows"] == 11 for shard in found["a"]["shards"]) and found["a"]["revision"] is None
    early = stream(build(folder, {"a": 1.0}, tokens=20))
    list(early)
    (only,) = early.realised()["a"]["shards"]
    assert not only["complete"] and early.realised()["a"]["epochs"] == 0
    json.dumps(found)


# --- what a row becomes ---------------------------------------------------------------------------------------


def rendered(tmp_path: Path, rows: list[dict], **source) -> list[str]:
    write(tmp_path / "r" / "0.parquet", rows)
    given = StreamSource(share=1, path=tmp_path / "r", **source)
    shards = stream_sources.open_shards("r", given, 10)
    return [t for table in shards.tables(0, 0, 10) for t in stream_sources.render("r", given, table, "0.parquet", 0)]


def test_text_question_and_turns(tmp_path):
    turns = [{"role": "user", "content": "q?"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": None}]
    rows = [{"text": "t", "q": "1+1?", "a": "2", "m": turns}, {"text": None, "q": " ", "a": "3", "m": []}]
    assert rendered(tmp_path, rows, text="text") == ["t", ""]
    assert rendered(tmp_path, rows, question="q", answer="a") == ["1+1?\n2", ""]
    assert rendered(tmp_path, rows, turns="m") == ["User: q?\nAssistant: a\nUser: ", ""]
    other = [{"m": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}]
    assert rendered(tmp_path, other, turns="m") == ["User: q\nAssistant: a"]
    assert rendered(tmp_path, other, turns="m", prefix_turns=False) == ["q\na"]


def test_filters(tmp_path):
    rows = [{"text": str(i), "j": j, "n": n, "s": s} for i, (j, n, s) in enumerate([("right", 3, "0.5"), ("wrong", 4, "1"), ("right", None, "-1"), (None, 5, "1"), ("right", 9, None)])]  # fmt: skip
    assert rendered(tmp_path, rows, text="text", equals={"j": "right"}) == ["0", "2", "4"]
    assert rendered(tmp_path, rows, text="text", at_least={"n": 4}) == ["1", "3", "4"]
    assert rendered(tmp_path, rows, text="text", equals={"j": "right"}, at_least={"n": 3}) == ["0", "4"]
    assert rendered(tmp_path, rows, text="text", at_least={"s": 0}) == ["0", "1", "3"]  # numbers kept as text
    assert rendered(tmp_path, rows, text="text", equals={"n": 9}) == ["4"]
    with pytest.raises(UserError, match=r"^source r, 0\.parquet rows 0 to 4: equals or at_least cannot be compared"):
        rendered(tmp_path, rows, text="text", at_least={"j": 1})


@pytest.mark.parametrize(
    ("rows", "source", "sentence"),
    [
        ([{"t": 1}], {"text": "t"}, r"row 0: t hold int that does not read as text"),
        ([{"m": [{"role": "judge", "content": "x"}]}], {"turns": "m"}, r"row 0: m hold list .* as chat turns \('judge'\)"),
        ([{"m": [{"role": "user", "content": ["x"]}]}], {"turns": "m"}, r"a turn holds list"),
    ],
)
def test_row_that_does_not_read_is_named(tmp_path, rows, source, sentence):
    with pytest.raises(UserError, match=sentence):
        rendered(tmp_path, rows, **source)


@given(st.integers(1, 60), st.integers(2, 20), st.integers(0, 19))
def test_cut_covers_and_overlaps(size, length, overlap):
    overlap = min(overlap, length - 1)
    whole = np.arange(size)
    pieces = cut(whole, length, overlap)
    assert all(1 <= len(p) <= length for p in pieces) and np.array_equal(np.unique(np.concatenate(pieces)), whole)
    for a, b in itertools.pairwise(pieces):
        assert len(a) == length and np.array_equal(a[len(a) - overlap :], b[:overlap]) and len(b) > overlap
    assert len(pieces) == max(1, -(-(size - overlap) // (length - overlap)))


def test_overlap_reaches_the_rows(folder):
    plain, lapped = (documents(stream(build(folder, {"b": 1.0}, length=20, overlap=o, tokens=300))) for o in (0, 5))
    assert any(a[-5:] == b[:5] and a[:1] == "b" for a in lapped for b in lapped) and plain != lapped


# --- one clear sentence ---------------------------------------------------------------------------------------


def refuse(values: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        configs.validate(StreamConfig, {"tokens": 10, "length": 8, **values}, "configs/x.yaml")


def test_configuration_that_contradicts_itself(tmp_path):
    good = {"share": 1.0, "path": str(tmp_path), "text": "t"}
    refuse(
        {"sources": {"w": {**good, "share": 0}}}, r"sources\.w\.share = 0: a source with a share of 0 is never read; delete it"
    )
    refuse(
        {"sources": {"w": {**good, "share": 0.7}}}, r"^configs/x\.yaml: the shares of sources sum to 0\.7, not 1; correct them$"
    )
    refuse({"sources": {}}, "sources is empty; name at least one source")
    refuse({"sources": {"w": {**good, "repo": "a/b"}}}, "either repo or path; give exactly one")
    refuse({"sources": {"w": {**good, "turns": "m"}}}, "give exactly one of these")
    refuse({"sources": {"w": {**good, "text": None, "question": "q"}}}, "question and answer belong together")
    refuse({"sources": {"w": good}, "overlap": 8}, "overlap 8 is not below length 8; lower it")
    refuse({"sources": {"w": {**good, "revision": "main"}}}, "revision")


def run(source: dict, **values) -> list:
    one = stream(
        StreamConfig(**{"sources": {"w": {"share": 1, "text": "text", **source}}, "tokens": 500, "length": 16, **values})
    )
    return list(one)


def test_missing_source_or_shard_or_column(folder, tmp_path):
    with pytest.raises(UserError, match=r"^source w: .*/nowhere does not exist; correct path or write the shards first\.$"):
        run({"path": tmp_path / "nowhere"})
    with pytest.raises(UserError, match=r"gives 0 files.*; correct path or files\.$"):
        run({"path": folder / "a", "files": "*.jsonl"})
    with pytest.raises(UserError, match=r"has no column 'txt'; its columns are text, other\.$"):
        run({"path": folder / "a", "text": "txt"})
    with pytest.raises(UserError, match=r"has no column 'score'"):
        run({"path": folder / "a", "at_least": {"score": 3}})
    with pytest.raises(UserError, match="source w"):
        stream(StreamConfig(sources={"w": {"share": 1, "text": "t", "path": tmp_path / "no"}}, tokens=5, length=4)).check()


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_empty_shard_is_named(tmp_path, ending):
    write(tmp_path / f"0.{ending}", [{"text": "abc"}])
    write(tmp_path / f"1.{ending}", [])
    with pytest.raises(
        UserError, match=rf"^source w: shard 1\.{ending} has no rows; write it again or leave it out with files\.$"
    ):
        run({"path": tmp_path})
    assert run({"path": tmp_path, "files": f"0.{ending}"})


def test_damaged_shard_is_named(tmp_path):
    write(tmp_path / "0.parquet", [{"text": "abc"}] * 30)
    write(tmp_path / "1.parquet", [{"text": "abc"}] * 30)
    (tmp_path / "1.parquet").write_bytes((tmp_path / "1.parquet").read_bytes()[:50])
    with pytest.raises(UserError, match=r"^source w: shard 1\.parquet cannot be read from row 0 on \(.*\); repair it"):
        run({"path": tmp_path})


def test_source_that_runs_out_is_refused_if_so_configured(folder):
    with pytest.raises(UserError, match=r"^source w ran out after 4 documents and \d+ tokens, before the budget was met; set when_exhausted: repeat"):  # fmt: skip
        run({"path": folder / "c", "when_exhausted": "refuse"})
    assert run({"path": folder / "c"})
    with pytest.raises(UserError, match=r"no row of .* is left after the filters"):
        run({"path": folder / "c", "equals": {"other": 77}})


def test_error_in_a_worker_stays_one_sentence(folder):
    config = build(folder, {"c": 1.0})
    config = config.model_copy(update={"sources": {"c": config.sources["c"].model_copy(update={"when_exhausted": "refuse"})}})
    with pytest.raises(StreamError) as caught:
        list(batches(Feed(stream(config)), 1))
    assert str(caught.value).startswith("source c ran out") and "\n" not in str(caught.value)


def test_state_of_another_stream_is_refused(folder, tmp_path):
    one = stream(build(folder, SHARES[2]))
    next(iter(one))
    state = through(one.state_dict())
    for other, name in (
        (stream(build(folder, SHARES[2]), 1), "seed"),
        (stream(build(folder, SHARES[2], length=17)), "length"),
        (stream(build(folder, {"a": 0.5, "b": 0.5})), "sources"),
        (TokenStream(build(folder, SHARES[2]), tokenizer.wrap(tokenizer.characters("ab")), 0), "vocabulary"),
    ):
        with pytest.raises(UserError, match=f"written with another `{name}`; restore it"):
            other.load_state_dict(state)
    with pytest.raises(UserError, match="has version 7"):
        one.load_state_dict({**state, "version": 7})
    write(tmp_path / "a" / "0.parquet", [{"text": "abc"}] * 9)
    moved = stream(build(tmp_path, {"a": 1.0}))
    next(iter(moved))
    state = moved.state_dict()
    write(tmp_path / "a" / "1.parquet", [{"text": "abc"}])
    grown = stream(build(tmp_path, {"a": 1.0}))
    grown.load_state_dict(state)
    with pytest.raises(UserError, match=r"source a: .* no longer has the shards"):
        next(iter(grown))


# --- a data set of the hub ------------------------------------------------------------------------------------


@pytest.fixture
def hub(folder, tmp_path, monkeypatch) -> list[dict]:
    """A folder that the real builders take for the repository own/set; what they were asked for."""
    import datasets

    for i in (0, 1):
        write(tmp_path / "own" / "set" / f"part-{i}.parquet", [{"text": t} for t in texts("h", 9, 12)])
    write(tmp_path / "own" / "set" / "other.parquet", [{"text": "zzz"}] * 9)
    monkeypatch.chdir(tmp_path)
    asked, real = [], datasets.load_dataset_builder
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *a, **k: asked.append((*a, k)) or real(*a, **k))
    return asked


def test_hub_data_set_is_read_at_its_commit(hub):
    config = StreamConfig(
        sources={"w": {"share": 1, "repo": "own/set", "revision": "a" * 40, "files": "part-*.parquet", "text": "text", "split": "test"}},
        tokens=400, length=16, window=4,
    )  # fmt: skip
    one = stream(config)
    rows = list(one)
    assert hub[0] == ("own/set", None, {"data_files": {"test": ["part-*.parquet"]}, "revision": "a" * 40})
    assert all(text.startswith(("h", "x", "y", "z", " ", ".", ";")) and "zzz" not in text for text in documents(rows))
    found = one.realised()["w"]
    assert found["revision"] == "a" * 40 and found["place"] == "own/set@aaaaaaaa" and len(found["shards"]) == 2


def test_hub_data_set_needs_a_commit_and_must_be_there(hub):
    with pytest.raises(UserError, match=r"^source w: own/set has no revision; run `make pin` once with network access\.$"):
        run({"repo": "own/set"})
    with pytest.raises(
        UserError, match=r"^source w: own/none@aaaaaaaa could not be opened \(Couldn't reach 'own/none' .*\); check repo"
    ):
        run({"repo": "own/none", "revision": "a" * 40})
    with pytest.raises(UserError, match=r"could not be opened \(Bad split: nope"):
        run({"repo": "own/set", "revision": "a" * 40, "split": "nope"})
    with pytest.raises(UserError, match=r"could not be opened \(BuilderConfig 'b' not found"):
        run({"repo": "own/set", "revision": "a" * 40, "config_name": "b"})


def test_only_wanted_columns_are_read(folder):
    shards = stream_sources.open_shards("a", StreamSource(share=1, path=folder / "a", text="text"), 5)
    table = next(shards.tables(1, 3, 5))
    assert table.column_names == ["text"] and len(table) == 5


def test_streams_settings_are_plain_json(folder):
    assert through(stream(build(folder, SHARES[3])).settings) == stream(build(folder, SHARES[3])).settings
    assert stream(build(folder, SHARES[3])).state_dict()["version"] == streams.VERSION
