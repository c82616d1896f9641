"""Runs a function in two processes of one group, and gives back what each returned or raised."""

import multiprocessing
import os
import pickle
import socket
import time
import traceback

import torch


# Far more than the cases take; a deadlock must end the test and not the machine.
DEADLINE = 120


def run_on_two_ranks(backend, function, *args):
    """
    Call `function(rank, *args)` in two forked processes, which have this one's modules and need no second import.

    They talk over `backend`, `"gloo"` or `"nccl"`; with the latter each has a GPU of its own, which this process must
    not have touched.

    Returns:
        `list`: Per rank `("returned", value)`, `("raised", "Type: message")` or `("hung", None)`.
    """
    context = multiprocessing.get_context("spawn" if backend == "nccl" else "fork")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes, ends = [], []
    for rank in range(2):
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(rank, backend, port, sending, function, args), daemon=True)
        process.start()
        sending.close()
        processes.append(process)
        ends.append(receiving)
    limit = time.monotonic() + DEADLINE
    results = []
    for end in ends:
        answered = end.poll(max(limit - time.monotonic(), 0))
        try:
            # By value: tensors sent as they are would share memory with a process that is gone.
            results.append(pickle.loads(end.recv_bytes()) if answered else ("hung", None))
        except EOFError:
            results.append(("raised", "the process died"))
    for process in processes:
        process.join(max(limit - time.monotonic(), 0))
        if process.is_alive():
            process.kill()
    return results


def _child(rank, backend, port, sending, function, args):
    # Set before the host reads them.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    try:
        if backend == "nccl":
            torch.cuda.set_device(rank)
        torch.distributed.init_process_group(backend, rank=rank, world_size=2)
        answer = "returned", function(rank, *args)
    except BaseException as error:
        traceback.print_exc()
        answer = "raised", f"{type(error).__name__}: {error}"
    try:
        sending.send_bytes(pickle.dumps(answer))
    finally:
        # No destructors and no exit handlers of the process this one was forked from.
        os._exit(0)
