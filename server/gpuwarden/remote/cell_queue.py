"""Run a fan-out's cells on one machine, at most one per GPU at a time. This file is copied to the machine.

Standard library only, Python >= 3.8. All cells run the same command, with different settings and in separate folders.
`cell.json` in that folder is written last, so an interrupted cell runs again and a successful cell does not.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from typing import Any, Dict, List, Optional

RETRIES = 2
"""The maximum number of restarts per queue run for a cell that was killed by a signal."""
GRACE_S = 8.0
TERMINATED = 128 + signal.SIGTERM
"""The exit code after an interruption. The runner then restarts the queue."""


class Slot:
    """A slot for one cell at a time: one GPU, or the whole machine."""

    def __init__(self, number: int, order: Dict[str, Any], command: List[str], leaving: List[int]) -> None:
        self.number, self.order, self.command, self.leaving = number, order, command, leaving
        self.cell: Dict[str, Any] = {}
        self.child: Optional[Any] = None
        self.tries = 0
        self.began = 0.0
        self.ends = math.inf
        self.timed_out = False

    def start(self, cell: Dict[str, Any]) -> None:
        """Start a cell in its folder, with links to the job's inputs."""
        self.cell, self.began, self.timed_out = cell, time.time(), False
        self.ends = time.monotonic() + (self.order.get("cell_timeout_s") or math.inf)
        folder = os.path.abspath(cell["folder"])
        os.makedirs(folder, exist_ok=True)
        for name in os.listdir("."):
            link = os.path.join(folder, name)
            if name != "cells" and not os.path.lexists(link):
                os.symlink(os.path.abspath(name), link)
        env = dict(os.environ, GPUWARDEN_OUTPUT_DIR=folder, GPUWARDEN_CELL=str(cell["index"]))
        env["GPUWARDEN_METRICS"] = os.path.join(folder, "metrics.jsonl")
        if self.order["slots"] > 1:
            env["CUDA_VISIBLE_DEVICES"] = str(self.number)
        with open(os.path.join(folder, "log.txt"), "ab") as log:
            self.child = subprocess.Popen(
                self.command + cell["args"], cwd=folder, env=env, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        print("cell %d: started" % cell["index"], flush=True)

    def finished(self) -> bool:
        """Return whether the slot is free. Stop a cell after its time limit; restart a cell killed by a signal."""
        if self.child is None:
            return True
        code = self.child.poll()
        if code is None:
            if time.monotonic() > self.ends:  # monotonic, so that setting the clock does not stop a cell
                self.timed_out = True
                self.end()
                code = self.child.poll()
            if code is None:
                return False
        if self.leaving:  # the cell was stopped along with the queue; the next queue run restarts it
            return False
        self.sweep()
        if code < 0 and not self.timed_out and self.tries < RETRIES:
            self.tries += 1
            print("cell %d: killed by signal %d; restarting it unchanged" % (self.cell["index"], -code), flush=True)
            self.start(self.cell)
            return False
        self.record(code)
        self.child, self.tries = None, 0
        return True

    def record(self, code: int) -> None:
        """Remove the links to the inputs, then write the cell's result to `cell.json`."""
        folder = self.cell["folder"]
        for name in os.listdir(folder):
            link = os.path.join(folder, name)
            if os.path.islink(link) and os.path.dirname(os.readlink(link)) == os.getcwd():
                os.unlink(link)
        state = "timeout" if self.timed_out else "done" if code == 0 else "failed"
        report = {"index": self.cell["index"], "config": self.cell["config"], "settings": self.cell["settings"]}
        report.update(state=state, exit_code=code, started_at=self.began, ended_at=time.time())
        with open(os.path.join(folder, "cell.tmp"), "w") as file:
            json.dump(report, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(os.path.join(folder, "cell.tmp"), os.path.join(folder, "cell.json"))
        print("cell %d: %s (exit code %d)" % (self.cell["index"], state, code), flush=True)

    def sweep(self) -> None:
        """Kill processes that a finished cell left running, because they could still write files and use the GPU."""
        if self.child is not None:
            try:
                os.killpg(self.child.pid, signal.SIGKILL)
            except OSError:
                pass

    def signal(self, number: int) -> None:
        """Send a signal to the cell's process group."""
        if self.child is not None and self.child.poll() is None:
            try:
                os.killpg(self.child.pid, number)
            except OSError:
                pass

    def end(self) -> None:
        """Stop the cell, giving it `GRACE_S` seconds to save its state."""
        self.signal(signal.SIGTERM)
        if self.child is not None:
            try:
                self.child.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                self.signal(signal.SIGKILL)
                self.child.wait()
            self.sweep()


def is_done(cell: Dict[str, Any]) -> bool:
    """Return whether this cell has already succeeded with this configuration."""
    try:
        with open(os.path.join(cell["folder"], "cell.json")) as file:
            found = json.load(file)
        return bool(found["state"] == "done" and found["config"] == cell["config"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def run(order: Dict[str, Any], command: List[str]) -> int:
    """Run the cells that are not done. Return 0 if all succeed, 1 if any fails, and `TERMINATED` after SIGTERM."""
    waiting = [cell for cell in order["cells"] if not is_done(cell)]
    print("%d of %d cells to run" % (len(waiting), len(order["cells"])), flush=True)
    leaving: List[int] = []
    slots = [Slot(number, order, command, leaving) for number in range(order["slots"])]

    def leave(number: int, _: Any) -> None:
        leaving.append(number)
        for slot in slots:
            slot.signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)
    try:
        while not leaving:
            free = [slot for slot in slots if slot.finished()]
            for slot in free[: 0 if leaving else len(waiting)]:
                slot.start(waiting.pop(0))
            if not waiting and all(slot.child is None for slot in slots):
                return 0 if all(is_done(cell) for cell in order["cells"]) else 1
            time.sleep(order.get("poll_s", 0.05))
        return TERMINATED
    finally:  # no cell may outlive its queue, even after an error such as a full disk
        for slot in slots:
            slot.signal(signal.SIGTERM)
        for slot in slots:
            slot.end()


if __name__ == "__main__":
    with open(sys.argv[1]) as _file:
        _order = json.load(_file)
    sys.exit(run(_order, sys.argv[2:]))
