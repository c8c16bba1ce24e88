"""A real SLURM on this machine, and projects whose drivers run on it side by side.

Snakemake's executor asks SLURM at most every 40 seconds, so one scenario after another would take an hour. All drivers
are started at the beginning of the session; each test waits for its own. Scenarios that hurt a node have one of their own.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.project import ROOT, Project

SCRIPT = Path(__file__).parent / "cluster.sh"
SFT = "results/test/sft/train/two_style-sft/seed0/manifest.json"
REQUIRED = os.environ.get("POSTTRAIN_REQUIRE_CLUSTER") == "1"
PROGRAMS = ("slurmctld", "slurmd", "slurmdbd", "munged", "mariadbd", "bindfs")
DEEPSPEED = ROOT / ".deepspeed"


def unavailable(reason: str) -> None:
    """Skip on a developer's machine; fail where the cluster must be there."""
    if REQUIRED:
        pytest.fail(reason)
    pytest.skip(reason)


def slurm(*words: str) -> str:
    """Standard output of a SLURM command; fails the test if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"{words}: {done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def cluster(tmp_path_factory) -> Iterator[Path]:
    """Folder of a running cluster."""
    path = os.environ["PATH"] + ":/usr/sbin"
    missing = [name for name in PROGRAMS if not shutil.which(name, path=path)]
    if missing:
        unavailable(
            f"what the cluster tests need is not installed ({', '.join(missing)} missing); `{SCRIPT.relative_to(ROOT)} install` as root"
        )
    if os.getuid() != 0:
        unavailable("the test cluster's slurmd must run as root")
    folder = tmp_path_factory.mktemp("slurm")
    for parent in (folder, *folder.parents[:3]):
        parent.chmod(parent.stat().st_mode | 0o055)
    done = subprocess.run([str(SCRIPT), "start", str(folder)], capture_output=True, text=True, check=False, timeout=180)
    if done.returncode:
        pytest.fail(f"the test cluster did not start: {done.stdout[-500:]}{done.stderr[-500:]}")
    yield folder
    subprocess.run([str(SCRIPT), "stop", str(folder)], capture_output=True, check=False, timeout=60)


class Cluster(Project):
    """A copy of the project, its profile edited as a user would, with a driver that runs on the cluster."""

    driver: subprocess.Popen

    def __init__(self, folder: Path, partition: str = "cpu", done: Path | None = None) -> None:
        super().__init__(folder)
        profile = folder / "profiles" / "slurm" / "profile.yaml"
        text = profile.read_text().replace("your_account", "test")
        profile.write_text(text.replace("your_cpu_partition", partition).replace("your_gpu_partition", partition))
        if done:
            shutil.copytree(done / "results", folder / "results")
            shutil.copytree(done / "configs", folder / "configs", dirs_exist_ok=True)
            shutil.copytree(done / ".snakemake", folder / ".snakemake", ignore=shutil.ignore_patterns("locks", "log"))

    def edit(self, name: str, pattern: str, new: str) -> None:
        path = self.folder / name
        text, count = re.subn(pattern, new, path.read_text())
        assert count, f"{pattern} is not in {name}"
        path.write_text(text)

    def start(self, *words: str, **environment: str) -> None:
        """`snakemake --profile slurm ...` in the background."""
        log = open(self.folder / "driver.log", "a")  # noqa: SIM115
        words = (sys.executable, "-m", "snakemake", "--profile", "slurm", *words)
        where = {"cwd": self.folder, "env": {**self.environment, **environment}}
        self.driver = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, **where)

    def output(self) -> str:
        return (self.folder / "driver.log").read_text()

    def ends(self, seconds: int = 900) -> int:
        try:
            return self.driver.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.driver.kill()
            raise AssertionError(f"the driver still ran after {seconds} s:\n{self.output()[-3000:]}") from None

    def jobs(self) -> list[str]:
        """SLURM ids of this project's jobs, in order of submission."""
        return re.findall(r"submitted with SLURM jobid (\d+)", self.output())

    def account(self, job: str, *fields: str) -> list[str]:
        """Fields of a job from sacct."""
        found = slurm("sacct", "-X", "-n", "-P", "-j", job, "-o", ",".join(fields)).strip()
        return found.split("|") if found else [""] * len(fields)

    def awaits(self, what: Callable[[], bool], seconds: int = 300, because: str = "") -> None:
        for _ in range(seconds * 5):
            if what():
                return
            time.sleep(0.2)
        raise AssertionError(f"waited {seconds} s for {because or what}:\n{self.output()[-2000:]}")

    def running(self) -> None:
        """Wait until the trainer of the SFT job has a complete checkpoint; no question to SLURM, which has enough to do."""
        folder = (self.folder / SFT).parent
        self.awaits(
            lambda: self.jobs() and any(folder.glob("checkpoints/*/checkpoint-*/complete.json")),
            because="a running job with a checkpoint",
        )

    def steps(self) -> list[int]:
        import json

        lines = ((self.folder / SFT).parent / "history.jsonl").read_text().splitlines()
        return [json.loads(line)["step"] for line in lines]

    def job_log(self) -> str:
        return (self.folder / "logs/test/sft/train/two_style-sft.seed0.log").read_text()


def long_training(project: Cluster, steps: int = 3000, **resources: float) -> None:
    """An SFT job of half a minute or more with checkpoints."""
    project.edit("configs/test/sft.yaml", "steps: 12,", f"steps: {steps},")
    project.edit("configs/test/sft.yaml", "checkpoint_every: 4", "checkpoint_every: 100")
    words = ", ".join(f"{name}: {value}" for name, value in resources.items())
    project.edit("configs/test/sft.yaml", "(?m)^train:$", f"train:\n  resources: {{{words}}}" if words else "train:")


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> Path:
    """A project in which everything before SFT is finished, without the cluster."""
    found = Project(tmp_path_factory.mktemp("prepared"))
    for name, old, new in (  # a base that is right now and then, so that GRPO has something to learn from
        ("data", "train: 256", "train: 2000"),
        ("data", "tokens: 8000", "tokens: 40000"),
        ("base", "steps: 20, batch_size: 4", "steps: 300, batch_size: 16"),
    ):
        path = found.folder / f"configs/test/{name}.yaml"
        path.write_text(path.read_text().replace(old, new))
    found.run("--target", "results/test/sft/traces/two_style/seed0/manifest.json")
    return found.folder


def cancelled(project: Cluster) -> None:
    long_training(project)
    project.start(SFT)
    project.running()
    slurm("scancel", project.jobs()[0])


def time_limit(project: Cluster) -> None:
    # Two minutes: on a busy machine the start alone may take the half minute that one minute would leave.
    long_training(project, steps=10000, hours=2 / 60)
    project.start(SFT)


def out_of_memory(project: Cluster) -> None:
    long_training(project, steps=100, mem_gb=0.6)
    project.start(SFT)


def node_fails(project: Cluster) -> None:
    long_training(project)
    project.start(SFT)
    project.running()
    node = project.account(project.jobs()[0], "NodeList")[0]
    slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=test")


def preempted(project: Cluster) -> None:
    long_training(project)
    project.start(SFT)
    project.running()
    slurm("sbatch", "-p", "high", "-c", "4", "--job-name", "wins", "-o", "/dev/null", "--wrap", "sleep 5")


def driver_killed(project: Cluster) -> None:
    long_training(project, steps=8000)  # on a busy machine the second driver takes a while to submit its copy
    project.start(SFT)
    project.running()
    project.driver.send_signal(signal.SIGKILL)
    project.driver.wait()
    project.start(SFT)  # `rerun-incomplete` is in the profile; the lock of the dead driver is not
    if project.driver.wait(timeout=60) and "--unlock" in project.output():
        project.call("-m", "snakemake", "--unlock")
        project.start(SFT)


def refused(project: Cluster) -> None:
    project.start(SFT)


def without_accounting(project: Cluster) -> None:
    broken = project.folder / "broken"
    broken.mkdir()
    (broken / "sacct").write_text("#!/bin/sh\necho 'Slurm accounting storage is disabled' >&2\nexit 1\n")
    (broken / "sacct").chmod(0o755)
    path = f"{broken}{os.pathsep}{project.environment['PATH']}"
    project.start(SFT, "--slurm-status-command", "squeue", PATH=path)


def slow_logs(project: Cluster) -> None:
    """`logs` on a file system that takes 300 bytes a second, for the driver, SLURM and the job alike."""
    for name in ("logs", "slow"):
        (project.folder / name).mkdir(exist_ok=True)
    subprocess.run(["bindfs", "--write-rate=300", project.folder / "slow", project.folder / "logs"], check=True, timeout=30)
    project.start(SFT)


def deepspeed_tasks(project: Cluster, nodes: int, gpus: int) -> None:
    """One task per ZeRO stage on the same data, and two processes."""
    stages = ("plain", "zero1", "zero2", "zero3")
    inputs = "start: base/scratch/two_style, traces: sft/traces/two_style"
    sft = [f"    {s}: {{{inputs}, deepspeed: {ds(s)}}}\n" for s in stages]
    sft += [f"    {s}_cut: {{{inputs}, deepspeed: {ds(s)}, accumulation: 4}}\n" for s in ("zero2", "zero3")]
    rl = [f"    {s}: {{task: data/tasks/two_style, deepspeed: {ds(s)}}}\n" for s in stages]
    size = f"  resources: {{nodes: {nodes}, gpus: {gpus}, threads: 2}}\n"
    project.edit("configs/test/sft.yaml", "(?m)^train:\n", f"train:\n{size}")
    project.edit("configs/test/sft.yaml", "(?s)(train:.*?  task:\n)", lambda found: found[1] + "".join(sft))
    project.edit("configs/test/rl.yaml", "(?m)^grpo:\n", f"grpo:\n{size}")
    project.edit("configs/test/rl.yaml", "  task:\n", "  task:\n" + "".join(rl))
    mid = "start: base/scratch/two_style, mix: data/mix/two_style, length: 32, steps: 6, batch_size: 8"
    models = "".join(f"    {s}: {{{mid}, deepspeed: {ds(s)}}}\n" for s in ("plain", "zero3"))
    (project.folder / "configs/test/midtrain.yaml").write_text(f"prism:\n{size}  model:\n{models}")
    shape = "shape: {hidden: 8, layers: 1, heads: 1, intermediate: 16, context: 96}, student: cut"
    kd = f"teacher: base/scratch/two_style, mix: data/mix/two_style, length: 32, steps: 6, batch_size: 8, {shape}"
    kd = "".join(f"    {s}: {{{kd}, deepspeed: {ds(s)}}}\n" for s in ("plain", "zero3"))
    arm = "    tad: {divergence: {k: 2}, head: 2}\n"
    (project.folder / "configs/test/distill.yaml").write_text(f"tail_kd:\n{size}  task:\n{kd}  arm:\n{arm}")


SFT_TASKS = ("plain", "zero1", "zero2", "zero3", "zero2_cut", "zero3_cut")  # cut: four micro-batches per step


def ds(stage: str) -> str:
    return "null" if stage == "plain" else stage


def one_node(project: Cluster) -> None:
    deepspeed_tasks(project, nodes=1, gpus=2)
    names = [f"results/test/sft/train/{task}-sft/seed0/manifest.json" for task in SFT_TASKS]
    names += [f"results/test/rl/grpo/{task}-base/seed0/manifest.json" for task in ("plain", "zero2", "zero3")]
    names += [f"results/test/midtrain/prism/{model}/seed0/manifest.json" for model in ("plain", "zero3")]
    names += [f"results/test/distill/tail_kd/{task}-tad/seed0/manifest.json" for task in ("plain", "zero3")]
    project.start(*names, PYTHONPATH=f"{project.folder / 'src'}{os.pathsep}{DEEPSPEED}")


def two_nodes(project: Cluster) -> None:
    deepspeed_tasks(project, nodes=2, gpus=1)
    names = [f"results/test/sft/train/{task}-sft/seed0/manifest.json" for task in ("plain", "zero3")]
    project.start(
        *names,
        "results/test/rl/grpo/zero3-base/seed0/manifest.json",
        PYTHONPATH=f"{project.folder / 'src'}{os.pathsep}{DEEPSPEED}",
    )


def everything(project: Cluster) -> None:
    project.start("all")


SCENARIOS: dict[str, tuple[Callable[[Cluster], None], str]] = {
    "everything": (everything, "cpu"),
    "time_limit": (time_limit, "cpu"),
    "cancelled": (cancelled, "cpu"),
    "out_of_memory": (out_of_memory, "cpu"),
    "node_fails": (node_fails, "spare"),
    "preempted": (preempted, "low"),
    "driver_killed": (driver_killed, "cpu"),
    "refused": (refused, "no_such_partition"),
    "without_accounting": (without_accounting, "cpu"),
    "slow_logs": (slow_logs, "cpu"),
    "one_node": (one_node, "gpu"),
    "two_nodes": (two_nodes, "gpu"),
}


class Session:
    """Every scenario's driver, each started by a thread of its own."""

    def __init__(self, folder: Path, prepared: Path) -> None:
        self.projects, self.threads, self.errors = {}, {}, {}
        for name, (begin, partition) in SCENARIOS.items():
            done = None if name == "everything" else prepared
            self.projects[name] = Cluster(folder / name, partition, done)
            self.threads[name] = threading.Thread(target=self.begin, args=(name, begin), daemon=True)
        for thread in self.threads.values():
            thread.start()

    def begin(self, name: str, begin: Callable[[Cluster], None]) -> None:
        try:
            begin(self.projects[name])
        except BaseException as error:
            self.errors[name] = error

    def __getitem__(self, name: str) -> Cluster:
        self.threads[name].join(timeout=600)
        if name in self.errors:
            raise self.errors[name]
        return self.projects[name]


@pytest.fixture(scope="session")
def session(cluster, prepared, project, tmp_path_factory) -> Iterator[Session]:
    found = Session(tmp_path_factory.mktemp("drivers"), prepared)
    yield found
    for project in found.projects.values():
        if hasattr(project, "driver") and project.driver.poll() is None:
            project.driver.kill()
    subprocess.run(["umount", "--lazy", found.projects["slow_logs"].folder / "logs"], capture_output=True, check=False)
