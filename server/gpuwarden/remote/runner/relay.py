"""Run the relay: a process next to the job that accepts the job's reports, spools them to disk, and forwards them.

The relay listens only on the loopback address, uses the server API's paths and responses, and responds as soon as a
report is in the spool. A trainer that does not retry thus loses no reports while the server is unreachable. If a server
is configured, the relay sends it both spool files in order, until the server has all lines, or for up to an hour after
the job's end. Otherwise, the server pulls the spool.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from gpuwarden.remote.runner.files import read_small, write_atomic
from gpuwarden.remote.runner.protocol import Json
from gpuwarden.remote.runner.reports import ALERTS_PATH, MAX_REPORT, METRICS_PATH, OF_KIND, OF_STATE
from gpuwarden.remote.runner.spool import SPOOLS, Spool, parse_lines, read_lines, utc
from gpuwarden.remote.runner.uploader import input_closed, read_order

GIVE_UP_REPORTS_S = 3600.0  # time limit after the job's end; the remaining lines can be pulled
LONGEST_RETRY_S = 60.0
BATCH_POINTS = 500
SENT_LIST = "spool.sent.json"
AGAIN = (408, 425, 429)  # temporary errors; after other errors, a retry would fail again
TYPES = {"job_started", *(kind for kind, _ in (*OF_KIND.values(), *OF_STATE.values()))}


def relay(folder: str, descriptor: int) -> None:
    """Accept reports until the supervisor exits, which closes stdin. Then send the remaining lines."""
    folder = os.path.realpath(folder)
    order = json.loads(read_order())
    receive(Intake(folder, order), descriptor)
    sender = Sender(folder, order)
    closed_at = None
    while True:
        if not os.path.isdir(folder):
            sys.exit(3)
        if closed_at is None and input_closed(0.0):
            closed_at = time.monotonic()
        pause = sender.send_all() if order["keys"].get("URL") else None
        if closed_at is None:
            input_closed(1.0 if pause is None else pause)
        elif pause is None or time.monotonic() - closed_at > GIVE_UP_REPORTS_S:
            return
        else:
            time.sleep(pause)


# -- reports from the job


class Intake:
    """Validates and spools posted reports."""

    def __init__(self, folder: str, order: Json) -> None:
        import threading

        self.names, self.job, self.spool, self.lock = (
            order["names"],
            order["job"],
            Spool(folder, "job"),
            threading.Lock(),
        )
        self.proofs = {
            METRICS_PATH: ("Authorization", "Bearer " + order["keys"]["TOKEN"]),
            ALERTS_PATH: ("X-API-Key", order["keys"].get("KEY", "")),
        }

    def refusal(self, path: str, headers: Any) -> tuple[int, str]:
        """Check the headers. Return an HTTP status and an error code, or status 0 if the body must be read."""
        import hmac

        if path not in self.proofs:
            return 404, "not_found"
        name, proof = self.proofs[path]
        if not hmac.compare_digest(proof.encode(), (headers.get(name) or "").encode("utf-8", "replace")):
            return 401, "auth_failed"
        size = headers.get("Content-Length") or ""
        if not size.isdigit():
            return 411, "length_required"
        return (413, "too_large") if int(size) > MAX_REPORT else (0, "")

    def take(self, path: str, raw: bytes) -> tuple[int, str]:
        """Spool a body. Return the HTTP status and the error code."""
        body, problem = accepted_body(raw, path, self.names, self.job)
        if body is None:
            return 422, problem
        with self.lock:
            kept = self.spool.put("metrics" if path == METRICS_PATH else "alerts", body)
        return (200, "") if kept else (507, "disk_full")


def receive(intake: Intake, descriptor: int) -> None:
    """Serve on the supervisor's listening socket, in threads."""
    import socket
    import threading
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 60.0

        def do_POST(self) -> None:
            status, code = intake.refusal(self.path, self.headers)
            self.close_connection = status > 0  # the body was not read
            if not status:
                status, code = intake.take(self.path, self.rfile.read(int(self.headers["Content-Length"])))
            self.answer(status, code)

        def refuse(self) -> None:
            self.close_connection = True
            self.answer(405, "method_not_allowed")

        def answer(self, status: int, code: str) -> None:
            ok: Json = {"ok": False, "code": code} if code else {"ok": True, "spooled": True}
            text = json.dumps(ok).encode("ascii")
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            if status == 405:
                self.send_header("Allow", "POST")
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    for method in ("GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS"):
        setattr(Handler, "do_" + method, Handler.refuse)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = socket.socket(fileno=descriptor)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()


def accepted_body(raw: bytes, path: str, names: list[str], job: str) -> tuple[Json | None, str]:
    """Return the body to spool, or None and the error code."""
    try:
        body = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError):
        return None, "not_json"
    if not isinstance(body, dict):
        return None, "not_an_object"
    if body.get("job_id") not in names:
        return None, "another_job"
    if path == METRICS_PATH and not (isinstance(body.get("metrics"), list) and body["metrics"]):
        return None, "metrics_missing"
    if path == ALERTS_PATH:
        if not isinstance(body.get("type"), str) or body["type"] not in TYPES:
            return None, "unknown_alert_type"
        body.setdefault("timestamp", utc(time.time()))
    return {**body, "job_id": job}, ""


# -- requests to the server


def unsettled_answer(status: int) -> bool:
    """Return whether a request that got this status (0: no response) may succeed later."""
    return status == 0 or status in AGAIN or status >= 500


class Sender:
    """Sends the spool in order. `sent`, which is also saved to disk, contains the offsets confirmed by the server."""

    def __init__(self, folder: str, order: Json) -> None:
        self.folder, self.keys = folder, order["keys"]
        self.sent = dict.fromkeys(SPOOLS, 0)
        self.pause = 1.0
        try:
            known = json.loads(read_small(folder + "/" + SENT_LIST, 4096))
            self.sent = {source: int(known.get(source) or 0) for source in SPOOLS}
        except (OSError, ValueError, AttributeError, TypeError, RecursionError):
            pass

    def send_all(self) -> float | None:
        """Send the spooled lines. Return None if the server has all of them, or the seconds until the next attempt."""
        for source in SPOOLS:
            while True:
                text, end = read_lines(self.folder, source, self.sent[source], 1 << 18)
                if end == self.sent[source]:
                    break
                if not self.send(parse_lines(text)):
                    pause, self.pause = self.pause, min(self.pause * 2, LONGEST_RETRY_S)
                    return pause
                self.pause = 1.0
                self.sent[source] = end
                try:
                    write_atomic(self.folder + "/" + SENT_LIST, json.dumps(self.sent).encode("ascii"))
                except OSError:
                    pass  # the lines are sent again after a restart, and the server ignores duplicates
        return None

    def send(self, entries: list[Json]) -> bool:
        """Send entries in order, with consecutive points in one request. Return False if a retry is needed."""
        points: list[Any] = []
        for entry in entries:
            body = entry["body"]
            if entry["kind"] == "metrics":
                given = body.get("metrics")
                points += given if isinstance(given, list) else []
            if points and (entry["kind"] == "alerts" or len(points) >= BATCH_POINTS):
                if not self.send_points(points, body["job_id"]):
                    return False
                points = []
            if entry["kind"] == "alerts":
                status = self.post(ALERTS_PATH, body, {"X-API-Key": self.keys.get("KEY", "")})
                if unsettled_answer(status):
                    return False
        return not points or self.send_points(points, entries[-1]["body"]["job_id"])

    def send_points(self, points: list[Any], job: str) -> bool:
        """Send points in batches. A batch that the server rejects is halved and sent again. Return False if a retry is
        needed.
        """
        headers = {"Authorization": "Bearer " + self.keys["TOKEN"]}
        pieces = [points[at : at + BATCH_POINTS] for at in range(0, len(points), BATCH_POINTS)]
        while pieces:
            piece = pieces[0]
            status = self.post(METRICS_PATH, {"job_id": job, "metrics": piece}, headers)
            if unsettled_answer(status):
                return False
            half = len(piece) // 2
            refused = status == 422 and half  # without halving, the others would be lost with one invalid point
            pieces[:1] = [piece[:half], piece[half:]] if refused else []
        return True

    def post(self, path: str, body: Json, headers: dict[str, str]) -> int:
        """Send one request. Return the HTTP status; 0 if no response arrived."""
        import urllib.error
        import urllib.request

        data = json.dumps(body).encode("ascii")
        request = urllib.request.Request(  # noqa: S310 (the scheme comes from the supervisor's order)
            self.keys["URL"].rstrip("/") + path, data, {"Content-Type": "application/json", **headers}
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as reply:  # noqa: S310
                return int(reply.status)
        except urllib.error.HTTPError as refusal:
            refusal.close()
            return int(refusal.code)
        except (OSError, ValueError):
            return 0
