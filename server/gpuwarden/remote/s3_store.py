"""Read an artifact store in S3: the manifest, the objects, and their sizes and checksums from HEAD requests.

Requires boto3 (the `s3` extra) and a key with list and read access; the uploader on the machine uses a different key.
"""

from __future__ import annotations

import base64
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any, TypeVar

from anyio import get_cancelled_exc_class, to_thread

from gpuwarden.core.credentials import credential, without_login
from gpuwarden.core.errors import AuthFailed, BadReply, NotFound, NotSupported, Unreachable
from gpuwarden.core.installing import install_command
from gpuwarden.core.sanitize import line
from gpuwarden.core.store_address import MAX_MANIFEST, StoreAddress, StoredFile

_THREADS = 8  # requests mostly wait for the network
_PIECE = 1 << 16
_STREAM = 1 << 20
_ABSENT = frozenset({"404", "NoSuchKey", "NotFound"})
_DENIED = frozenset({"403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"})
_CREDENTIALS = {
    "aws_access_key_id": "AWS_ACCESS_KEY_ID",
    "aws_secret_access_key": "AWS_SECRET_ACCESS_KEY",
    "aws_session_token": "AWS_SESSION_TOKEN",
}
_COUNT = re.compile("[1-9][0-9]{0,4}")
_T = TypeVar("_T")


class S3Reader:
    """An S3 bucket. Implements `Store`."""

    def __init__(self, address: StoreAddress, env: Mapping[str, str]) -> None:
        self.address = address
        self._given_up = Event()
        self._endpoint = without_login(env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL") or "")
        options = {option: credential(env, name) for option, name in _CREDENTIALS.items()}
        try:
            import boto3  # type: ignore[import-untyped,unused-ignore]
            from botocore.config import Config  # type: ignore[import-untyped,unused-ignore]
        except ImportError as error:
            raise NotSupported("boto3 is not installed", f"Install it: {install_command('boto3', 's3')}") from error
        # Without keys or a region in the environment, boto3 uses the AWS configuration.
        self._client: Any = self._ask(lambda: boto3.client(
            "s3",
            endpoint_url=self._endpoint or None,
            region_name=env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION"),
            **options,
            config=Config(signature_version="s3v4", retries={"max_attempts": 2, "mode": "standard"}, connect_timeout=5,
                          read_timeout=20, max_pool_connections=_THREADS),
        ))  # fmt: skip

    async def reach(self) -> None:
        """Check access by listing at most one object under the path."""
        named = {"Bucket": self.address.root, "Prefix": self.address.path, "MaxKeys": 1}
        if await self._in_thread(lambda: self._ask(lambda: self._client.list_objects_v2(**named))) is None:
            raise _no_bucket(self.address.root)

    async def manifest(self, key: str) -> bytes | None:
        """Return the manifest's content; None if it does not exist. Raises BadReply if it is too long."""

        def get() -> bytes:
            body, content = self._client.get_object(Bucket=self.address.root, Key=key)["Body"], bytearray()
            while len(content) <= MAX_MANIFEST and not self._given_up.is_set() and (piece := body.read(_PIECE)):
                content += piece
            return bytes(content)

        content = await self._in_thread(lambda: self._ask(get))
        if content is not None and len(content) > MAX_MANIFEST:
            raise BadReply(f"the manifest of {self.address} is longer than {MAX_MANIFEST:,} bytes")
        return content

    async def files(self, keys: Sequence[str], *, read: bool = True) -> dict[str, StoredFile]:
        """Return the size and checksum of each object that exists. The content is not downloaded."""

        def head(key: str) -> tuple[str, StoredFile | None]:
            named = {"Bucket": self.address.root, "Key": key, "ChecksumMode": "ENABLED"}
            return key, self._ask(lambda: _described(self._client.head_object(**named)))

        def heads() -> dict[str, StoredFile]:
            with ThreadPoolExecutor(_THREADS) as pool:
                return {key: found for key, found in pool.map(head, keys) if found}

        return await self._in_thread(heads)

    async def read(self, key: str, offset: int = 0) -> AsyncIterator[bytes]:
        """Stream one object from `offset`, which must be less than the object's size."""
        named = {"Bucket": self.address.root, "Key": key, "Range": f"bytes={offset}-"}
        # The caller may open another stream after canceling this one, so `_given_up` is not set here.
        reply = await to_thread.run_sync(self._ask, lambda: self._client.get_object(**named), abandon_on_cancel=True)
        if reply is None:
            raise NotFound(f"{self.address} has no object {line(key, 200)}", "List the store's objects.")
        body = reply["Body"]
        try:
            while piece := await to_thread.run_sync(self._ask, lambda: body.read(_STREAM), abandon_on_cancel=True):
                yield piece
        finally:
            body.close()

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        """Run `work` in a thread. If canceled, do not wait for the thread and send no more requests."""
        try:
            return await to_thread.run_sync(work, abandon_on_cancel=True)
        except get_cancelled_exc_class():
            self._given_up.set()
            raise

    def _ask(self, request: Callable[[], _T]) -> _T | None:
        """Send a request. Return None if the object does not exist.

        Other boto3 errors are converted to gpuwarden errors. boto3's messages are never quoted, because they may
        contain headers and URLs with secrets.
        """
        from botocore import exceptions as boto  # type: ignore[import-untyped,unused-ignore]

        if self._given_up.is_set():
            raise Unreachable(f"{self._place}: the request was canceled", "Try again in a minute.")
        try:
            return request()
        except boto.ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            if code in _ABSENT:
                return None
            message = f"S3 returned an error for the bucket {self.address.root}: {line(code, 40)}"
            if code == "NoSuchBucket":
                raise _no_bucket(self.address.root) from None
            if code in _DENIED:
                hint = "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY here to a key with list and read access."
                raise AuthFailed(message, hint) from None
            raise Unreachable(message, "Try again in a minute.") from None
        except (
            boto.NoCredentialsError,
            boto.PartialCredentialsError,
            boto.NoRegionError,
            boto.ProfileNotFound,
        ) as error:
            message = f"this machine's AWS settings are incomplete: {type(error).__name__}"
            raise AuthFailed(message, "Set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION here.") from None
        except (boto.HTTPClientError, boto.ConnectionError, boto.IncompleteReadError) as error:
            message = f"{self._place}: {type(error).__name__}"
            raise Unreachable(message, "Check the network and the endpoint, then try again.") from None
        except Exception as error:  # any other error from the library or the server
            raise BadReply(f"{self._place}: {type(error).__name__}", "Check AWS_ENDPOINT_URL.") from None

    @property
    def _place(self) -> str:
        return line(self._endpoint or "S3", 100)


def _no_bucket(name: str) -> NotFound:
    return NotFound(f"the bucket {name} does not exist", "Check the bucket's name and the endpoint.")


def _described(reply: Mapping[str, Any]) -> StoredFile:
    """Parse the size and checksum in a HEAD response. A multipart upload's checksum ends with the number of parts."""
    size, (text, mark, count) = int(reply["ContentLength"]), str(reply.get("ChecksumSHA256") or "").partition("-")
    try:
        digest = base64.b64decode(text, validate=True).hex()
    except ValueError:
        digest = ""
    if len(digest) != 64 or (mark and not _COUNT.fullmatch(count)):
        return StoredFile(size)
    return StoredFile(size, None, digest, int(count)) if mark else StoredFile(size, digest)
