"""Processes forked from one that has imported the libraries, which takes seconds for each process of its own.

Nothing of ropecli is imported there: each process imports it as a fresh interpreter does.
"""

import multiprocessing
import os
import runpy
import signal
import socket
import sys
from multiprocessing import forkserver

import torch

LINUX = sys.platform == "linux"  # elsewhere a fork may break what the libraries began: import there
CONTEXT = multiprocessing.get_context("forkserver" if LINUX else "spawn")
MODELS = ["transformers.models.llama.modeling_llama", "transformers.models.auto.tokenization_auto"]
CONTEXT.set_forkserver_preload(["torch._dynamo", *MODELS, "accelerate", "typer", "pydantic.main", "pytest"])


def begin():
    if LINUX:
        forkserver.ensure_running()


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def ranks(count):
    """For each process of a launch, what torchrun sets in its environment."""
    same = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return [{name: str(value) for name, value in {**same, "RANK": n, "LOCAL_RANK": n}.items()} for n in range(count)]


def ropecli(arguments):
    """As `python -m ropecli`."""
    sys.argv = ["ropecli", *map(str, arguments)]
    runpy.run_module("ropecli", run_name="__main__", alter_sys=True)


def _run(function, arguments, environment, outputs, terminal):
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # OpenMP reads it when it is loaded
    if terminal:
        os.login_tty(os.open(terminal, os.O_RDWR))
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    function(*arguments)


class Forked:
    """One process, or those of a launch, which share their output: as a subprocess.Popen."""

    def __init__(self, folder, function, *arguments, processes=1, terminal=None, **variables):
        """terminal: path of that which controls the process and gets its output."""
        self.outputs = [] if terminal else [folder / "out", folder / "err"]
        for path in self.outputs:
            path.touch()
        environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), **variables}
        self.processes = []
        for launch in ranks(processes) if processes > 1 else [{}]:
            options = (function, arguments, {**environment, **launch}, self.outputs, terminal)
            self.processes.append(CONTEXT.Process(target=_run, args=options))
            self.processes[-1].start()

    def poll(self):
        codes = [process.exitcode for process in self.processes]
        return None if None in codes else max(codes, key=bool)

    returncode = property(poll)

    def wait(self, timeout=300):
        for process in self.processes:
            process.join(timeout)
        assert self.poll() is not None, "It is still running."
        return self.returncode

    def send_signal(self, number):
        for process in self.processes:
            if process.exitcode is None:
                os.kill(process.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def communicate(self):
        self.wait()
        return [path.read_text() for path in self.outputs]
