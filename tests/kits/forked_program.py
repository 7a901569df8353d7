"""Run programs as forks of a process that has imported the training libraries, because importing takes seconds.

python forked_program.py serve SOCKET           # prints a line when it is ready
python -S forked_program.py run SOCKET PROGRAM  # like `python PROGRAM`: same folder, variables, output, and end
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import sys
import threading
import types
from typing import NoReturn

KIND = (socket.AF_UNIX, socket.SOCK_SEQPACKET)


def run(path: str, program: str) -> NoReturn:
    """Have the server run a program, and end as the program did: with its exit code or by its signal."""
    with socket.socket(*KIND) as server:
        server.connect(path)
        order = {"program": program, "env": dict(os.environ), "cwd": os.getcwd()}
        socket.send_fds(server, [json.dumps(order).encode()], [1, 2])
        code = int(server.recv(64))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def serve(path: str) -> None:
    """Fork a child for each connection, until this process is terminated."""
    from forked import preload

    preload(
        "datasets peft torch",
        transformers="Trainer LlamaForCausalLM PreTrainedTokenizerFast",
        trl="SFTTrainer DPOTrainer GRPOTrainer RewardTrainer",
    )
    listener = socket.socket(*KIND)
    listener.bind(path)
    listener.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped automatically
    print("ready", flush=True)
    while True:
        client, _ = listener.accept()
        if not os.fork():
            listener.close()
            watch(client)
        client.close()


def watch(client: socket.socket) -> None:
    """Run the program in a child process and send its exit code, or -N if signal N ended it."""
    from forked import own_progress_locks

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    text, fds, _, _ = socket.recv_fds(client, 1 << 20, 2)
    order = json.loads(text)
    if child := os.fork():
        client.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
        os._exit(0)
    client.close()
    own_progress_locks()
    for fd, target in zip(fds, (1, 2), strict=True):
        os.dup2(fd, target)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    as_main(order["program"])


def as_main(program: str) -> NoReturn:
    """Run a file as the main module, with the traceback that Python would print.

    Skips the teardown of the libraries' modules at exit, which takes a second.
    """
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=program, __builtins__=__builtins__)
    sys.modules["__main__"], sys.argv, sys.path[0] = main, [program], os.path.dirname(program)
    code = 0
    try:
        with open(program, encoding="utf-8") as file:
            exec(compile(file.read(), program, "exec"), main.__dict__)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:
        trace = error.__traceback__
        sys.excepthook(type(error), error, trace.tb_next if trace else None)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    {"run": run, "serve": serve}[sys.argv[1]](*sys.argv[2:])
