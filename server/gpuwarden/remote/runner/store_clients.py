"""Upload to artifact stores through their official clients: boto3 for S3, huggingface_hub for the Hub."""

from __future__ import annotations

import io
import os
from typing import Any, Callable

from gpuwarden.remote.runner.files import stamp
from gpuwarden.remote.runner.parts import part_size
from gpuwarden.remote.runner.protocol import Json, Problem

CLIENTS = {"s3": "boto3", "hf": "huggingface_hub"}
Throttle = Callable[[int], None]
SMALL = 10 << 20


class Changed(Exception):
    """Raised if a file no longer matches its seal. The file is uploaded after it has been sealed again."""


class S3Store:
    """An S3 bucket. A multipart upload resumes after a restart: parts that the store already has are not sent again.

    The access key needs the permissions PutObject, AbortMultipartUpload and ListMultipartUploadParts. If it lacks the
    last one, all parts are sent again. `uploads` maps keys to the ids of uploads in progress.
    """

    def __init__(self, keep: Json, keys: dict[str, str], uploads: dict[str, str], remember: Callable[[], None]) -> None:
        import boto3  # type: ignore[import-untyped,unused-ignore]
        from botocore.config import Config  # type: ignore[import-untyped,unused-ignore]

        self.bucket, self.uploads, self.remember = keep["root"], uploads, remember
        self.client = boto3.client(
            "s3",
            endpoint_url=keys.get("AWS_ENDPOINT_URL_S3") or keys.get("AWS_ENDPOINT_URL"),
            region_name=keys.get("AWS_REGION") or keys.get("AWS_DEFAULT_REGION") or "us-east-1",
            aws_access_key_id=keys.get("AWS_ACCESS_KEY_ID"),
            aws_secret_access_key=keys.get("AWS_SECRET_ACCESS_KEY"),
            aws_session_token=keys.get("AWS_SESSION_TOKEN"),
            config=Config(signature_version="s3v4", retries={"max_attempts": 5, "mode": "standard"},
                          connect_timeout=20, read_timeout=60, max_pool_connections=2),
        )  # fmt: skip

    def put(self, key: str, fd: int, row: Json, pace: Throttle) -> None:
        """Upload one file. Raises Changed, without creating an object, if the content does not match the row."""
        import hashlib

        size, step = row["size"], part_size(row["size"])
        if size <= step:
            data = read_exactly(fd, 0, size)
            if hashlib.sha256(data).hexdigest() != row["sha256"]:
                raise Changed
            self.put_bytes(key, data)
            pace(size)
            return
        there = self.there(key)
        upload = self.uploads[key]
        sha, parts = hashlib.sha256(), []
        for number, at in enumerate(range(0, size, step), 1):
            data = read_exactly(fd, at, min(step, size - at))
            sha.update(data)
            digest = checksum(data)
            tag = hashlib.md5(data).hexdigest()  # noqa: S324 - an ETag is an MD5
            if there.get(number) != tag:
                answer = self.client.upload_part(
                    Bucket=self.bucket, Key=key, UploadId=upload, PartNumber=number, Body=data, ChecksumSHA256=digest
                )
                tag = answer["ETag"].strip('"')
                pace(len(data))
            parts.append({"PartNumber": number, "ETag": tag, "ChecksumSHA256": digest})
        if sha.hexdigest() != row["sha256"]:
            self.client.abort_multipart_upload(Bucket=self.bucket, Key=key, UploadId=upload)
            self.forget(key)
            raise Changed
        self.client.complete_multipart_upload(
            Bucket=self.bucket, Key=key, UploadId=upload, MultipartUpload={"Parts": parts}
        )
        self.forget(key)

    def there(self, key: str) -> dict[int, str]:
        """Return the ETags of the uploaded parts, by part number. Begin the upload if none is in progress."""
        from botocore.exceptions import ClientError  # type: ignore[import-untyped,unused-ignore]

        if key in self.uploads:
            named = {"Bucket": self.bucket, "Key": key, "UploadId": self.uploads[key]}
            try:
                pages = list(self.client.get_paginator("list_parts").paginate(**named))
                return {part["PartNumber"]: part["ETag"].strip('"') for page in pages for part in page.get("Parts", ())}
            except ClientError as error:
                if error.response["Error"]["Code"] == "AccessDenied":
                    return {}
                self.uploads.pop(key)  # the store aborted the upload
        made = self.client.create_multipart_upload(Bucket=self.bucket, Key=key, ChecksumAlgorithm="SHA256")
        self.uploads[key] = str(made["UploadId"])
        self.remember()
        return {}

    def forget(self, key: str) -> None:
        """Forget an upload that has been completed or aborted."""
        self.uploads.pop(key)
        self.remember()

    def put_bytes(self, key: str, data: bytes) -> None:
        """Upload a small object; the store verifies its digest."""
        self.client.put_object(Bucket=self.bucket, Key=key, Body=data, ChecksumSHA256=checksum(data))

    def commit(self, key: str, manifest: bytes) -> None:
        """Upload the manifest. All files that it lists must have been uploaded."""
        self.put_bytes(key, manifest)


class HubStore:
    """A Hub repo. One commit adds all collected files together with the manifest.

    Large files are stored by digest before the commit, so files sent by an earlier process are not sent again.
    """

    late = True  # files are visible only after the commit
    atomic = True  # the commit replaces the files and the manifest together

    def __init__(self, keep: Json, keys: dict[str, str]) -> None:
        os.environ["HF_HUB_DISABLE_TELEMETRY"] = os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        from huggingface_hub import HfApi

        self.repo, self.kind = keep["root"], keep["kind"]
        self.api: Any = HfApi(endpoint=keys.get("HF_ENDPOINT"), token=keys.get("HF_TOKEN"))
        self.added: list[Any] = []

    def put(self, key: str, fd: int, row: Json, pace: Throttle) -> None:
        """Collect one file, and send its content if the Hub stores it outside git. Raises Changed, like `S3Store`."""
        from huggingface_hub import CommitOperationAdd

        # The Hub never stores larger files in git, so their content is not needed for the commit.
        small = row["size"] <= SMALL
        file: Any = PacedFile(fd, row["size"])
        operation = CommitOperationAdd(
            path_in_repo=key, path_or_fileobj=read_exactly(fd, 0, row["size"]) if small else file
        )
        if operation.upload_info.sha256.hex() != row["sha256"]:
            raise Changed
        file.pace = pace
        self.api.preupload_lfs_files(self.repo, [operation], repo_type=self.kind, num_threads=1)
        self.added.append(operation)

    def commit(self, key: str, manifest: bytes) -> None:
        """Commit the collected files with the manifest."""
        from huggingface_hub import CommitOperationAdd

        added, self.added = self.added, []
        listed = CommitOperationAdd(path_in_repo=key, path_or_fileobj=manifest)
        self.api.create_commit(
            self.repo, [*added, listed], commit_message=f"Upload {len(added)} files of a job", repo_type=self.kind
        )


class HubBucket:
    """A Hub bucket. The Hub client can't limit the upload rate, so each file is followed by a pause.

    Content that the Hub already has is not sent again. Small files are collected and sent in batches.
    """

    late = True

    def __init__(self, keep: Json, keys: dict[str, str]) -> None:
        os.environ["HF_HUB_DISABLE_TELEMETRY"] = os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        from huggingface_hub import HfApi

        self.bucket = keep["root"]
        self.api: Any = HfApi(endpoint=keys.get("HF_ENDPOINT"), token=keys.get("HF_TOKEN"))
        if not hasattr(self.api, "batch_bucket_files"):
            raise Problem("not_supported", "the machine's huggingface_hub does not support buckets; update it")
        self.small: list[tuple[bytes, str]] = []

    def put(self, key: str, fd: int, row: Json, pace: Throttle) -> None:
        """Upload one file. Raises Changed if its content or times do not match its row."""
        import hashlib

        size = row["size"]
        if size <= SMALL:
            data = read_exactly(fd, 0, size)
            if hashlib.sha256(data).hexdigest() != row["sha256"]:
                raise Changed
            self.small.append((data, key))
            if sum(len(content) for content, _ in self.small) > SMALL:
                self.flush()
        else:  # through the descriptor, because the path may refer to another file now
            self.api.batch_bucket_files(self.bucket, add=[(f"/dev/fd/{fd}", key)])
            after = stamp(os.fstat(fd))
            if any(after[name] != row[name] for name in after):
                raise Changed
        pace(size)

    def flush(self) -> None:
        """Upload the collected files."""
        small, self.small = self.small, []
        if small:
            self.api.batch_bucket_files(self.bucket, add=small)

    def commit(self, key: str, manifest: bytes) -> None:
        """Upload the collected files, then the manifest."""
        self.flush()
        self.api.batch_bucket_files(self.bucket, add=[(manifest, key)])


class PacedFile(io.BufferedIOBase):
    """A readable file that wraps a descriptor and limits the read rate."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd, self.size, self.at = fd, size, 0
        self.pace: Throttle = lambda count: None

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the current position."""
        return self.at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Change the current position."""
        self.at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.size}[whence])
        return self.at

    def read(self, count: int | None = -1) -> bytes:
        """Return the next bytes, up to the file's size at the start of the upload."""
        left = max(0, self.size - self.at)
        data = os.pread(self.fd, left if count is None or count < 0 else min(count, left), self.at)
        self.at += len(data)
        self.pace(len(data))
        return data


def checksum(data: bytes) -> str:
    """Return the SHA-256 of data in S3's format (base64)."""
    import base64
    import hashlib

    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def read_exactly(fd: int, at: int, count: int) -> bytes:
    """Return exactly `count` bytes of a file, starting at offset `at`. Raises Changed if the file is shorter."""
    parts = []
    while count:
        data = os.pread(fd, count, at)
        if not data:
            raise Changed
        parts.append(data)
        at, count = at + len(data), count - len(data)
    return b"".join(parts)


def open_store(keep: Json, keys: dict[str, str], uploads: dict[str, str], remember: Callable[[], None]) -> Any:
    """Return the client for the store that an order specifies. `remember` saves the ids of `uploads` in progress."""
    if keep.get("scheme") not in CLIENTS:
        raise Problem("bad_request", "the artifact store has an unknown scheme")
    if keep["scheme"] == "s3":
        return S3Store(keep, keys, uploads, remember)
    return HubBucket(keep, keys) if keep.get("kind") == "bucket" else HubStore(keep, keys)
