"""From a rule's allocation to a process: plain Python, torchrun on one node, or srun + torchrun on several.

``python -m posttrain.core.launch --nodes N --gpus G --threads T --minutes M -- posttrain.sft.train --flag value ...``
prints the command that it runs (it can be pasted into a shell) and becomes it. G counts the cards of all nodes together,
as Snakemake and its SLURM executor do. Standard library only: this costs milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence

from posttrain.core import slots

USAGE = "usage: python -m posttrain.core.launch --nodes N --gpus G --threads T --minutes M -- MODULE [FLAG ...]"
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "POSTTRAIN_THREADS", "RAYON_NUM_THREADS")


def command(
    module: str,
    arguments: Sequence[str],
    *,
    nodes: int = 1,
    gpus: int = 0,
    threads: int = 1,
    python: str = "python",
    job_id: str | None = None,
) -> list[str]:
    """The argument vector for one job. Pure.

    nodes: machines. gpus: cards of the whole job, the same number on each machine (none, or one on one machine: one
    process per machine). threads: CPU threads of the job on a machine.
    job_id: SLURM's job id, which makes the rendezvous port of a multi-node job its own.
    On several nodes one `srun` task per node starts one torchrun; the address of the first node is read inside
    the task, because the executor removes SLURM's node variables from the outer environment.
    """
    if nodes < 1 or gpus < 0:
        raise ValueError(f"nodes={nodes}, gpus={gpus}: nodes must be at least 1 and gpus at least 0")
    if gpus % nodes:
        raise ValueError(
            f"nodes={nodes}, gpus={gpus}: each node needs the same number of cards; {gpus} is not a multiple of {nodes}"
        )
    cards = gpus // nodes
    if nodes == 1 and gpus <= 1:
        return [python, "-m", module, *arguments]
    run = [python, "-m", "torch.distributed.run"]  # `--` before the module: it would take --start for one of its own flags
    workers = max(cards, 1)
    if nodes == 1:
        return [*run, "--standalone", f"--nproc-per-node={workers}", "-m", "--", module, *arguments]
    port = 20000 + int(job_id or "0") % 20000
    # The static rendezvous puts rank 0, its store and $head on one node; c10d may part them, and rank 0, which measures for
    # long after the others have left, would lose the store.
    inner = [
        *run,
        f"--nnodes={nodes}",
        f"--nproc-per-node={workers}",
        "--rdzv-backend=static",
        f"--rdzv-id={job_id or 'local'}",
        "--node-rank=$SLURM_NODEID",
        "--master-addr=$head",
        f"--master-port={port}",
        "-m",
        "--",
        module,
        *arguments,
    ]
    # A node's name need not be a host's name; NodeAddr is what SLURM itself reaches it by.
    first = 'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1); '
    first += 'head=$(scontrol --oneliner show node "$head" | grep -o "NodeAddr=[^ ]*" | cut -d = -f 2); '
    script = f"{first}exec " + " ".join(
        word if word in ("--node-rank=$SLURM_NODEID", "--master-addr=$head") else shlex.quote(word) for word in inner
    )
    geometry = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", f"--cpus-per-task={threads}"]
    geometry += ["--kill-on-bad-exit=1", "--wait=0"]  # a node that fails ends all; one that is done first waits for rank 0
    return ["srun", *geometry, *([f"--gpus-per-node={cards}"] if cards else []), "bash", "-c", script]


def environment(threads: int, workers: int) -> dict[str, str]:
    """Thread limits per process: torchrun starts `workers` processes on a machine, which share the job's CPUs there."""
    share = str(max(1, threads // max(workers, 1)))
    return {**dict.fromkeys(THREAD_VARIABLES, share), "TOKENIZERS_PARALLELISM": "false"}


def slurm_times(job_id: str) -> tuple[float | None, float | None]:
    """(minutes until SLURM ends this job, when it was submitted in seconds since the epoch); None for what it does not say."""
    words = ["squeue", "--noheader", "--array-unique", "--job", job_id, "--format", "%A|%L|%V"]
    try:
        said = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout
        rows = [line.split("|") for line in said.split()]
        _, clock, when = next(row for row in rows if row[0] == job_id)
    except (OSError, subprocess.SubprocessError, ValueError, StopIteration):  # no squeue here, or an answer of another kind
        return None, None
    left = submitted = None
    with contextlib.suppress(ValueError):  # UNLIMITED
        days, _, clock = clock.rpartition("-")
        seconds = sum(int(part) * 60**power for power, part in enumerate(reversed(clock.split(":"))))
        left = (int(days or 0) * 86400 + seconds) / 60
    with contextlib.suppress(ValueError):
        submitted = time.mktime(time.strptime(when, "%Y-%m-%dT%H:%M:%S"))
    return left, submitted


def time_limit(minutes: int, left: float | None = None) -> float:
    """Minutes from now after which a trainer saves and stops, before SLURM ends it without a chance to save.

    minutes: the job's limit; left: what remains of it. A tenth of the limit is kept for saving, at least half a minute, at
    most 15 minutes.
    """
    return max(0.01, (minutes if left is None else left) - min(15.0, max(0.5, minutes / 10)))


def parse(arguments: Sequence[str]) -> tuple[dict[str, int], list[str]]:
    """Split the launcher's own flags from the module and its flags."""
    if "--" not in arguments:
        raise SystemExit(USAGE)
    cut = list(arguments).index("--")
    own, rest = list(arguments[:cut]), list(arguments[cut + 1 :])
    values = {"nodes": 1, "gpus": 0, "threads": 1, "minutes": 0}
    if len(own) % 2:
        raise SystemExit(f"error: {own[-1]} has no value; {USAGE}")
    for flag, value in zip(own[::2], own[1::2], strict=True):
        name = flag.removeprefix("--")
        if name not in values or not value.isdigit():
            raise SystemExit(f"error: {flag} {value} is not a launcher flag with a whole number; {USAGE}")
        values[name] = int(value)
    if not rest:
        raise SystemExit(USAGE)
    return values, rest


def main(arguments: Sequence[str] | None = None) -> None:
    values, (module, *flags) = parse(sys.argv[1:] if arguments is None else arguments)
    minutes, slurm_job = values.pop("minutes"), os.environ.get("SLURM_JOB_ID")
    try:
        words = command(module, flags, **values, python=sys.executable, job_id=slurm_job)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    shown = command(module, flags, **values, job_id=slurm_job)
    os.environ.update(environment(values["threads"], values["gpus"] // values["nodes"]))
    if slurm_job and minutes:  # elsewhere nobody ends a job
        left, submitted = slurm_times(slurm_job)
        os.environ["POSTTRAIN_MAX_MINUTES"] = str(time_limit(minutes, left))
        os.environ["POSTTRAIN_STARTED"] = str(time.time())
        if submitted:
            os.environ["POSTTRAIN_SUBMITTED"] = str(submitted)
    print(shlex.join(shown), flush=True)
    # A job of SLURM's sees its own cards; several jobs inside one allocation share them as on a machine without SLURM.
    shared = not slurm_job or (values["nodes"] == 1 and len(slots.visible()) > values["gpus"])
    if shared and (cards := slots.take(values["gpus"])):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(cards)
    warm = os.environ.get("POSTTRAIN_WARM")
    if warm and words[1:3] == ["-m", module]:
        from posttrain.core.warm import request

        code = request(warm, module, flags)
        if code is not None:
            raise SystemExit(code)
    os.execvp(words[0], words)


if __name__ == "__main__":
    main()
