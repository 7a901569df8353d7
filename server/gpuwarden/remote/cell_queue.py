"""Run the cells of a fan-out one after another on one machine, one per GPU at a time. Shipped as source.

Standard library only, Python >= 3.8. Every cell runs the same command with its own settings in its own folder.
`cell.json` in that folder is written last, so an interrupted cell runs again and a completed one does not.
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
"""Maximum restarts of a cell that a signal ended, in one run of the queue."""
GRACE_S = 8.0
TERMINATED = 128 + signal.SIGTERM
"""The exit code that the runner treats as an interruption, after which the queue is launched again."""


class Slot:
    """One GPU, or the whole machine, with the cell that runs there."""

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
        """Return whether the slot is free. Also end a cell past its time limit, and restart one that a signal ended."""
        if self.child is None:
            return True
        code = self.child.poll()
        if code is None:
            if time.monotonic() > self.ends:  # monotonic, so that setting the clock does not end a cell
                self.timed_out = True
                self.end()
                code = self.child.poll()
            if code is None:
                return False
        if self.leaving:  # it ended because the queue is ending, and runs again in the next queue
            return False
        self.sweep()
        if code < 0 and not self.timed_out and self.tries < RETRIES:
            self.tries += 1
            print("cell %d: ended by signal %d; restarted unchanged" % (self.cell["index"], -code), flush=True)
            self.start(self.cell)
            return False
        self.record(code)
        self.child, self.tries = None, 0
        return True

    def record(self, code: int) -> None:
        """Write the cell's result as its last file, and remove the links to the inputs."""
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
        """Kill the remaining processes of an ended cell, which could still write files and use the GPU."""
        if self.child is not None:
            try:
                os.killpg(self.child.pid, signal.SIGKILL)
            except OSError:
                pass

    def signal(self, number: int) -> None:
        """Send a signal to the cell's whole group."""
        if self.child is not None and self.child.poll() is None:
            try:
                os.killpg(self.child.pid, number)
            except OSError:
                pass

    def end(self) -> None:
        """End the cell, with time to save."""
        self.signal(signal.SIGTERM)
        if self.child is not None:
            try:
                self.child.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                self.signal(signal.SIGKILL)
                self.child.wait()
            self.sweep()


def is_done(cell: Dict[str, Any]) -> bool:
    """Return whether this cell has already completed with this configuration."""
    try:
        with open(os.path.join(cell["folder"], "cell.json")) as file:
            found = json.load(file)
        return bool(found["state"] == "done" and found["config"] == cell["config"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def run(order: Dict[str, Any], command: List[str]) -> int:
    """Run the cells that are not done. Return 0 if all are done afterwards, otherwise 1."""
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
