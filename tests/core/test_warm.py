"""The fork server: a job run through it ends, prints, sees and dies as the same job run for itself."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

SERVER = """
import sys
sys.path.insert(0, sys.argv[2])
from posttrain.core import warm
warm.PRELOAD = ("announce",)  # instead of torch and the rest; says when the server listens
warm.serve(sys.argv[1])
"""
PROBE = """
import json, os, sys
shown = {"argv": sys.argv[1:], "cwd": os.getcwd(), "name": __name__, "file": __file__, "path": sys.path[0]}
shown["env"] = {k: v for k, v in os.environ.items() if k != "POSTTRAIN_STARTED"}
shown["warm"] = "announce" in sys.modules
shown["stdin"] = sys.stdin.read()
json.dump(shown, open(os.environ["SHOW"], "w"))
print("to stdout")
print("to stderr", file=sys.stderr)
os.write(1, b"raw stdout\\n")
"""
ENDS = {
    "pass": 0,
    "import sys; sys.exit()": 0,
    "import sys; sys.exit(3)": 3,
    "import sys; sys.exit(75)": 75,
    "raise SystemExit(True)": 1,
    "raise SystemExit('error: key x is wrong')": 1,
    "raise ValueError('bug')": 1,
    "raise KeyboardInterrupt": None,
    "import os; os._exit(9)": 9,
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": None,
    "import nowhere_at_all": 1,
    "def f(:": 1,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Path]:
    """Address of a running server. Its own environment and folder differ from those of the jobs."""
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:  # short: a socket's path holds 107 bytes
        (Path(folder) / "announce.py").write_text("print('listening', flush=True)\n")
        address = Path(folder) / "socket"
        command = [sys.executable, "-c", SERVER, str(address), folder]
        environment = {**os.environ, "LEAK": "from the server", "OMP_NUM_THREADS": "7"}
        with subprocess.Popen(command, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "listening\n"
            yield address
            process.kill()


def launch(
    folder: Path, module: str, *flags: str, address: Path | None, stdin: str = "", **environment: str
) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(module, *flags),
        cwd=folder,
        env=variables(address, **environment),
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def command(module: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", "posttrain.core.launch", "--threads", "2", "--", module, *flags]


def variables(address: Path | None, **more: str) -> dict[str, str]:
    found = {k: v for k, v in os.environ.items() if k not in ("POSTTRAIN_WARM", "LEAK")} | more
    return found | ({"POSTTRAIN_WARM": str(address)} if address else {})


def probe(folder: Path, address: Path | None, *flags: str, **options) -> tuple[subprocess.CompletedProcess, dict]:
    (folder / "probe.py").write_text(PROBE)
    done = launch(folder, "probe", *flags, address=address, SHOW=str(folder / "shown.json"), **options)
    return done, json.loads((folder / "shown.json").read_text())


def test_same_streams_arguments_environment_and_folder(server, tmp_path):
    flags = ["--text", "a 'b' $HOME", "--x=-1", ""]
    (done, seen), (cold, expected) = (probe(tmp_path, a, *flags, stdin="a line\n", OWN="ü 1") for a in (server, None))
    assert (seen.pop("warm"), expected.pop("warm")) == (True, False)
    assert seen["env"].pop("POSTTRAIN_WARM") == str(server)
    assert seen == expected and seen["argv"] == flags and seen["stdin"] == "a line\n" and seen["cwd"] == str(tmp_path)
    assert seen["env"]["OWN"] == "ü 1" and seen["env"]["OMP_NUM_THREADS"] == "2" and "LEAK" not in seen["env"]
    assert (done.returncode, done.stdout, done.stderr) == (cold.returncode, cold.stdout, cold.stderr)
    assert done.stdout.splitlines()[1:] == ["to stdout", "raw stdout"] and done.stderr == "to stderr\n"


@pytest.mark.parametrize(("body", "code"), ENDS.items(), ids=lambda v: str(v)[:40])
def test_same_end(server, tmp_path, body, code):
    (tmp_path / "ends.py").write_text(f"print('before')\n{body}\n")
    done, cold = launch(tmp_path, "ends", address=server), launch(tmp_path, "ends", address=None)
    assert done.stdout == cold.stdout
    assert done.stderr.splitlines()[-1:] == cold.stderr.splitlines()[-1:]
    if code is None:  # death by a signal: any code but success
        assert done.returncode != 0 != cold.returncode
    else:
        assert done.returncode == cold.returncode == code


def test_missing_module(server, tmp_path):
    done, cold = (launch(tmp_path, "nowhere.at_all", address=address) for address in (server, None))
    assert done.returncode == cold.returncode == 1 and "No module named" in done.stderr


def test_an_edited_module_is_read_again(server, tmp_path):
    for text in ("first", "second"):
        (tmp_path / "edited.py").write_text(f"print({text!r})\n")
        assert launch(tmp_path, "edited", address=server).stdout.splitlines()[-1] == text


def test_jobs_run_side_by_side(server, tmp_path):
    """Each waits for the other: one after the other they would never end."""
    for name in ("a", "b"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "meet.py").write_text(
        "import sys\nmine, other = sys.argv[1:]\nif mine == 'a':\n    open('b', 'w').close(); open('a').close()\n"
        "else:\n    open('b').close(); open('a', 'w').close()\nprint('met', mine)\n"
    )
    options = {"cwd": tmp_path, "env": variables(server), "stdout": subprocess.PIPE, "text": True}
    first, second = (subprocess.Popen(command("meet", *names), **options) for names in (("a", "b"), ("b", "a")))
    assert first.communicate(timeout=30)[0].endswith("met a\n") and second.communicate(timeout=30)[0].endswith("met b\n")
    assert first.returncode == second.returncode == 0


SLEEPER = """
import os, signal
def survived(*_):
    print("survived", flush=True)
    os._exit(0)
signal.signal(signal.SIGALRM, survived)
signal.alarm(8)
print("pid", os.getpid(), flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 143)])
def test_the_job_dies_with_its_launcher(server, tmp_path, number, code):
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    options = {"cwd": tmp_path, "env": variables(server), "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command("sleeper"), **options) as launcher:
        launcher.stdout.readline()
        pid = int(launcher.stdout.readline().split()[1])
        assert pid != launcher.pid and Path(f"/proc/{pid}").exists()
        launcher.send_signal(number)
        rest = launcher.stdout.read()  # ends when nobody holds the stream any more, the job included
        assert launcher.wait() == code and rest == ""
    done, seen = probe(tmp_path, server)
    assert done.returncode == 0 and seen["warm"]  # the server lives on


def test_no_server_at_the_address(tmp_path):
    done, seen = probe(tmp_path, tmp_path / "nothing")
    assert done.returncode == 0 and not seen["warm"]


def test_a_dead_socket(tmp_path):
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        address = Path(folder) / "s"
        server.bind(str(address))
        server.close()
        assert address.exists()
        done, seen = probe(tmp_path, address, stdin="kept for the job")
    assert done.returncode == 0 and not seen["warm"] and seen["stdin"] == "kept for the job"


@pytest.mark.parametrize("read", [False, True])
def test_a_server_that_dies_before_it_takes_the_job(tmp_path, read):
    (tmp_path / "probe.py").write_text(PROBE)
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        address = Path(folder) / "s"
        server.bind(str(address))
        server.listen()
        environment = variables(address, SHOW=str(tmp_path / "shown.json"))
        with subprocess.Popen(
            command("probe"), cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        ) as launcher:
            connection, _ = server.accept()
            if read:
                connection.recv(4)
            connection.close()
            launcher.communicate(timeout=30)
    assert launcher.returncode == 0 and not json.loads((tmp_path / "shown.json").read_text())["warm"]


def test_a_client_that_says_nothing_does_no_harm(server, tmp_path):
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(server))
    done, seen = probe(tmp_path, server)
    assert done.returncode == 0 and seen["warm"]


def test_jobs_on_several_cards_go_past_the_server(server, tmp_path):
    """torchrun starts processes of its own; only a job of one process can be forked."""
    (tmp_path / "torch" / "distributed").mkdir(parents=True)
    for name in ("torch/__init__.py", "torch/distributed/__init__.py"):
        (tmp_path / name).write_text("")
    (tmp_path / "torch" / "distributed" / "run.py").write_text("import sys; print('announce' in sys.modules, *sys.argv[1:])\n")
    words = [*command("probe")[:3], "--gpus", "2", "--", "probe"]
    done = subprocess.run(words, cwd=tmp_path, env=variables(server), capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "False --standalone --nproc-per-node=2 -m -- probe"


def test_the_server_ends_with_the_process_that_started_it(tmp_path):
    starter = (
        "import subprocess, sys\n"
        "*words, writer = sys.argv[1:]\n"
        "streams = {'stdout': subprocess.PIPE, 'stderr': subprocess.DEVNULL, 'pass_fds': [int(writer)]}\n"
        "child = subprocess.Popen([sys.executable, '-c', *words], **streams)\n"
        "child.stdout.readline()\nprint(child.pid)\n"
    )
    reader, writer = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "announce.py").write_text("print('listening', flush=True)\n")
        words = [sys.executable, "-c", starter, SERVER, f"{folder}/s", folder, str(writer)]
        pid = int(subprocess.run(words, pass_fds=[writer], check=True, stdout=subprocess.PIPE, text=True).stdout)
        os.close(writer)
        gone = select.select([reader], [], [], 10)[0]  # readable when the last holder of the other end, the server, is gone
        if not gone:
            os.kill(pid, signal.SIGKILL)
        os.close(reader)
    assert gone
