"""Several processes in place of torchrun's: joined by Gloo like those, but forked from one with all imports done."""

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from .runs import save_no_picture

RUNS = 8  # that they can make one after the other


@dataclass
class Outcome:
    """What became of a process: exit status, result of the function, and what it said on standard error."""

    status: int
    result: Any
    said: str


def in_processes(folder: Path, function: Callable, *args, count: int = 2) -> list[Outcome]:
    """Call a function in several processes with the environment that torchrun gives them.

    Args:
        folder: Where to keep what they say.
        function: Function of a module, with results that can be pickled.
        args: Its arguments.
        count: Number of processes.

    Returns:
        An outcome for each of them.
    """
    stores = [torch.distributed.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False) for _ in range(RUNS)]
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload([function.__module__])
    processes, results = [], []
    for rank in range(count):
        environment = {
            'RANK': rank,
            'LOCAL_RANK': rank,
            'WORLD_SIZE': count,
            'MASTER_ADDR': '127.0.0.1',
            'MASTER_PORTS': ' '.join(str(store.port) for store in stores),
            'TORCHELASTIC_USE_AGENT_STORE': True,
        }
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(folder / f'said-{rank}', environment, sender, function, args))
        process.start()
        sender.close()
        processes.append(process)
        results.append(receiver)
    outcomes = []
    for rank, (process, receiver) in enumerate(zip(processes, results, strict=True)):
        try:
            result = receiver.recv() if receiver.poll(120) else None
        except EOFError:  # it ended without a result
            result = None
        process.join(10)
        if process.is_alive():
            process.kill()
        outcomes.append(Outcome(process.exitcode, result, (folder / f'said-{rank}').read_text()))
    return outcomes


def next_run() -> None:
    """Let the processes meet at another place than in an earlier run of theirs."""
    if 'MASTER_PORTS' in os.environ:
        os.environ['MASTER_PORT'], _, os.environ['MASTER_PORTS'] = os.environ['MASTER_PORTS'].partition(' ')


def _run(said: Path, environment: dict[str, Any], sender, function: Callable, args: tuple) -> None:
    os.environ.update({name: str(value) for name, value in environment.items()})
    next_run()
    with said.open('w') as file:
        os.dup2(file.fileno(), 2)
    sys.stderr = open(2, 'w', closefd=False)  # noqa: SIM115
    torch.set_num_threads(1)
    Figure.savefig = save_no_picture
    multiprocessing.set_start_method('fork', force=True)  # of a loader's processes, as under torchrun on Linux
    status = 1
    try:
        sender.send(function(*args))
        status = 0
    except SystemExit as e:
        status = e.code
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)
