"""A process that has imported torch, transformers and trl once and forks a child per job.

On a laptop a study is a hundred short jobs, and importing the stack costs each of them five seconds. `make run` starts
this server and names its socket in POSTTRAIN_WARM; the launcher hands its arguments, environment, folder and standard
streams over, waits, and returns the child's exit code. Without the variable the same command imports for itself, with
the same result. The child dies with the launcher, so that killing a job kills it here as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence

PRELOAD = ("torch", "transformers", "trl", "pandas", "pyarrow.parquet", "scipy.stats", "datasets")
LAZY = {
    "transformers": ("Trainer", "LlamaForCausalLM", "LlamaConfig", "PreTrainedTokenizerFast", "GenerationConfig"),
    "trl": ("GRPOTrainer", "GRPOConfig"),
}


def request(address: str, module: str, flags: Sequence[str]) -> int | None:
    """Run one module in a forked child. Returns its exit code, or None if no server takes it (run it yourself)."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address)
    except OSError:
        return None
    message = json.dumps({"module": module, "flags": list(flags), "env": dict(os.environ), "cwd": os.getcwd()}).encode()
    try:
        socket.send_fds(connection, [struct.pack("!I", len(message))], [0, 1, 2])
        connection.sendall(message)
        started = connection.recv(1)
    except OSError:
        started = b""
    if not started:  # the server died before it took the job over
        return None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(128 + signal.SIGTERM))  # closing the socket ends the child
    answer = connection.recv(4)
    return struct.unpack("!i", answer)[0] if len(answer) == 4 else 1


def serve(address: str) -> None:
    """Import the stack, then fork a child per request until the parent process goes away."""
    import importlib

    parent = os.getppid()
    server = socket.socket(socket.AF_UNIX)
    server.bind(address)
    server.listen(64)
    for name in PRELOAD:
        loaded = importlib.import_module(name)
        for attribute in LAZY.get(name, ()):
            getattr(loaded, attribute)
    server.settimeout(1.0)
    while os.getppid() == parent:
        try:
            connection, _ = server.accept()
        except TimeoutError:
            continue
        connection.settimeout(None)
        if os.fork() == 0:
            server.close()
            _supervise(connection)
        connection.close()
        _reap()


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _supervise(connection: socket.socket) -> None:
    """Fork again: the grandchild runs the job, this process reports its end or kills it when the launcher is gone."""
    head, descriptors, _, _ = socket.recv_fds(connection, 4, 3)
    (size,) = struct.unpack("!I", head)
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            os._exit(1)
        data += part
    job = json.loads(data)
    connection.sendall(b"+")  # from here on the job is ours
    worker = os.fork()
    if worker == 0:
        connection.close()
        _work(job, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)

    def watch() -> None:
        if not connection.recv(1):
            os.kill(worker, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    _, status = os.waitpid(worker, 0)
    with contextlib.suppress(OSError):  # nobody waits any more
        connection.sendall(struct.pack("!i", os.waitstatus_to_exitcode(status) % 256))
    os._exit(0)


def _work(job: dict, descriptors: list[int]) -> None:
    import runpy
    import traceback

    code = 1
    try:
        for target, descriptor in enumerate(descriptors):
            os.dup2(descriptor, target)
            os.close(descriptor)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        os.environ.clear()
        os.environ.update(job["env"])
        os.environ["POSTTRAIN_STARTED"] = str(time.time())
        os.chdir(job["cwd"])
        sys.argv = [job["module"], *job["flags"]]
        sys.path[:0] = [job["cwd"]]
        runpy.run_module(job["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if ended.code is not None and not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)  # as Python itself does
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1])
