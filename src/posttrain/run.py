"""`make run`: the tier's whole DAG on this machine, with a progress display, then the ledger and where the report is.

Starts the warm server (see core/warm.py), runs Snakemake, and reads its progress lines. Everything that this does can
be done with `snakemake` alone; it only saves the imports and shows less.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS = re.compile(r"^(\d+) of (\d+) steps")


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Progress:
    """One line that is rewritten on a terminal, or a line per finished job elsewhere."""

    def __init__(self, stream=sys.stdout) -> None:
        self.stream, self.start = stream, time.time()
        self.done = self.total = 0
        self.current = ""
        self.terminal = stream.isatty()

    def read(self, line: str) -> bool:
        """Take one line of Snakemake's output; true if it was progress (and need not be shown)."""
        if found := STEPS.match(line):
            self.done, self.total = map(int, found.groups())
        elif found := re.match(r"^(?:Job|localrule|Localjob) \d+: (.*)$", line):
            self.current = found[1]
        elif found := re.match(r"^total +(\d+)$", line):
            self.total = self.total or int(found[1])
        else:
            return False
        self.show(finished=bool(STEPS.match(line)))
        return True

    def show(self, finished: bool) -> None:
        elapsed = time.time() - self.start
        left = f"about {clock(elapsed / self.done * (self.total - self.done))} left" if self.done else "estimating"
        text = f"[{self.done}/{self.total}] {clock(elapsed)} elapsed, {left} | {self.current}"
        if self.terminal:
            width = os.get_terminal_size(self.stream.fileno()).columns
            print("\r" + text[: width - 1].ljust(width - 1), end="", file=self.stream, flush=True)
        elif finished:
            print(text, file=self.stream, flush=True)


@contextlib.contextmanager
def warm_server():
    """The address of a server that has imported the stack, or None if it cannot be started."""
    with tempfile.TemporaryDirectory(prefix="posttrain-") as folder:
        address = str(Path(folder) / "socket")
        environment = {
            **os.environ,
            **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
            "TOKENIZERS_PARALLELISM": "false",
        }
        server = subprocess.Popen(
            [sys.executable, "-m", "posttrain.core.warm", address],
            env=environment,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield address
        finally:
            server.terminate()
            server.wait()


def free_stale_lock(words: list[str]) -> None:
    """Snakemake's lock outlives a killed driver. Free it if no other driver works in this folder."""
    locks = Path(".snakemake/locks")
    if not locks.is_dir() or not any(locks.iterdir()):
        return
    import psutil

    here = os.getcwd()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.cwd() == here and any("snakemake" in w for w in process.cmdline()[:4]):
                return
    print("A driver was killed here; its lock is removed, unfinished jobs resume from their checkpoints.", flush=True)
    subprocess.run([*words, "--unlock"], capture_output=True, check=False)


def record(progress: Progress, cores: int, *, warm: bool) -> None:
    """Keep how long the run took, for `make bench`."""
    path = Path("benchmarks/jobs/last_run.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    took = {
        "started": progress.start,
        "seconds": time.time() - progress.start,
        "jobs": progress.done,
        "cores": cores,
        "warm": warm,
    }
    path.write_text(json.dumps(took) + "\n")


def show_ledger(path: Path) -> None:
    """The ledger as a table of fixed columns."""
    import csv

    with open(path) as stream:
        rows = list(csv.DictReader(stream))
    width = max(len(row["claim"]) for row in rows)
    print(f"\n{'method':8} {'claim':{width}} {'estimate':>9} {'95% interval':>18} {'n':>6} {'seeds':>5}  verdict")
    for row in rows:
        numbers = [f"{float(row[name]):.3f}" if row[name] else "" for name in ("estimate", "ci_low", "ci_high")]
        interval = f"[{numbers[1]}, {numbers[2]}]" if numbers[1] else ""
        print(
            f"{row['method']:8} {row['claim']:{width}} {numbers[0]:>9} {interval:>18} {row['n']:>6} {row['seeds']:>5}  {row['verdict']}"
        )
    if max(int(row["seeds"] or 0) for row in rows) == 1:
        print("\nOne seed: intervals are over items only, another seed may give other verdicts. `make study` runs three.")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m posttrain.run", description=__doc__.split("\n\n")[0])
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)), help="CPU cores to use")
    parser.add_argument("--target", default="all", help="rule or file to make")
    parser.add_argument("--config", nargs="*", default=[], help="as in snakemake: tier=tiny seeds=[0,1,2]")
    parser.add_argument("--cold", action="store_true", help="no warm server: every job imports for itself")
    given = parser.parse_args()
    words = [sys.executable, "-m", "snakemake", given.target, "--cores", str(given.cores), "--scheduler", "greedy"]
    words += ["--config", *given.config] if given.config else []
    free_stale_lock(words)
    progress = Progress()
    tail: list[str] = []
    with contextlib.ExitStack() as stack:
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONUNBUFFERED": "1",
        }
        if not given.cold:
            environment["POSTTRAIN_WARM"] = stack.enter_context(warm_server())
        run = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            for line in run.stdout:
                if not progress.read(line.rstrip()):
                    tail.append(line)
            code = run.wait()
        except KeyboardInterrupt:
            run.send_signal(signal.SIGINT)
            code = run.wait()
    print()
    if progress.done:
        record(progress, given.cores, warm=not given.cold)
    if code:
        print("".join(tail[-60:]), file=sys.stderr)
        print(
            "The run stopped; finished jobs are kept. Correct what the message names and run the same command again.",
            file=sys.stderr,
        )
        return code
    if any("Nothing to be done" in line for line in tail):
        print("Nothing to do: every result is up to date.")
    tier = next((word.partition("=")[2] for word in given.config if word.startswith("tier=")), None)
    if tier is None:
        from posttrain.core.config import read_yaml

        tier = read_yaml("configs/config.yaml").get("tier", "tiny")
    ledger, page = Path("results") / tier / "claims.csv", Path("results") / tier / "report" / "index.html"
    if given.target == "all" and ledger.is_file():
        show_ledger(ledger)
        print(f"\nLedger: {ledger}\nReport: {page} (open it in a browser)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
