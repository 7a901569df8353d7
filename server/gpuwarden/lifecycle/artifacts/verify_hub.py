"""Verify a checkpoint on the Hub.

Level `structure` downloads only headers, with range requests; names, sizes and digests are those that the Hub lists.
Every deeper level downloads the files into huggingface_hub's cache and verifies them there, against the listed digests.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio

from gpuwarden.checkpoints.budget import Budget
from gpuwarden.checkpoints.examine import examine, examine_file, examine_tree
from gpuwarden.checkpoints.findings import ExamineOptions, Expected, Findings
from gpuwarden.checkpoints.safe_file import Source
from gpuwarden.checkpoints.tree import Folder, Tree
from gpuwarden.checkpoints.verify import report, usable, verify
from gpuwarden.core.errors import DiskError, Refused, Unreachable
from gpuwarden.core.evidence import Cause, gravest_first
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.models import Level, Report, Verdict
from gpuwarden.core.sanitize import line
from gpuwarden.hub.client import HubClient, HubConfig
from gpuwarden.hub.files import Address, HubFile, Listing, RangeSource, download, list_files
from gpuwarden.lifecycle.context import Context

HEADER_S = 300.0
HEADER_BYTES = 1 << 30
MOST_UNASKED = 50 << 30
"""Maximum size in bytes of a download for a caller with a budget."""
_THREADS = 8  # requests spend most of their time waiting for the network
_ROOM = 1 << 30
_T = TypeVar("_T")


async def verify_hub(
    ctx: Context,
    address: str,
    level: Level,
    *,
    against: Path | Findings | None = None,
    budget: Budget | None = None,
    progress: Callable[[int], None] | None = None,
) -> Report:
    """Verify a repo, or a folder or file in it. All levels above `structure` download the files.

    Raises Refused if `budget` is given and the download is larger than `MOST_UNASKED`.
    """
    config, listing = await _list(ctx, address)
    if level is Level.STRUCTURE:
        if isinstance(against, Path):
            local = against
            against = await _thread(lambda: examine(usable(local), ExamineOptions(content=False)))
        found = await _thread(partial(_headers, listing, config, progress))
        made = report(found, level, address, against)
        known = sum(f.sha256 is not None for f in listing.files.values())
        unread = (
            f"the bytes (the Hub lists a sha256 for {known:,} of {len(listing.files):,} files); comparing them "
            f"requires level content, which downloads {listing.bytes:,} bytes"
        )
        proved = made.proved
        if made.verdict is Verdict.PROVEN:
            proved += (f"the sizes that the repo lists at commit {listing.commit[:12]} match its stored files",)
        return made.model_copy(update={"not_checked": (unread, *made.not_checked[1:]), "proved": proved})
    if budget and listing.bytes > MOST_UNASKED:
        raise Refused(
            f"{address} has {listing.bytes:,} bytes, and level {level} would download all of them",
            (
                do(Action.VERIFY, path=address, level="structure"),
                f"For level {level}, verify it at a terminal, where no size limit applies.",
            ),
        )
    folder = await _thread(partial(_downloaded, listing, config))
    work = partial(
        verify, folder / listing.address.path, level, expected=_expected(listing), against=against, budget=budget,
        progress=progress,
    )  # fmt: skip
    return _complete(listing, await _thread(work), address)


async def hub_structure(ctx: Context, address: str) -> Findings:
    """Return the structure of a checkpoint on the Hub, for comparison with another checkpoint."""
    config, listing = await _list(ctx, address)
    return await _thread(partial(_headers, listing, config, None))


async def _list(ctx: Context, address: str) -> tuple[HubConfig, Listing]:
    config = HubConfig.from_env(ctx.env)
    async with HubClient(config, clock=ctx.clock) as hub:
        return config, await list_files(hub, Address.parse(address))


async def _thread(work: Callable[[], _T]) -> _T:
    return await anyio.to_thread.run_sync(work, abandon_on_cancel=True)


def _inside(listing: Listing) -> dict[str, HubFile]:
    """Return the files, keyed by path relative to the address. If the address is a file, the key is its name."""
    base = listing.address.path
    cut = len(base) + 1 if base and base not in listing.files else base.rfind("/") + 1
    return {path[cut:]: file for path, file in listing.files.items()}


def _expected(listing: Listing) -> dict[str, Expected]:
    rows = _inside(listing).items()
    return {name: Expected(f.size, {"sha256": f.sha256} if f.sha256 else {}) for name, f in rows}


def _headers(listing: Listing, config: HubConfig, progress: Callable[[int], None] | None) -> Findings:
    """Examine all files through range requests."""
    alone = listing.address.path in listing.files
    root = Path("hf:") / listing.address.repo / ("" if alone else listing.address.path)
    paths = dict(zip(_inside(listing), listing.files, strict=True))
    budget = Budget(HEADER_S, HEADER_BYTES)

    def opened(path: Path, _: str) -> Source:
        inside = path.relative_to(root).as_posix()
        return RangeSource(listing, paths.get(inside, inside), config, ask.note)

    ask = ExamineOptions(False, _THREADS, expected=_expected(listing), progress=progress, budget=budget, open=opened)
    if alone:
        name = next(iter(paths))
        return Findings(root, {name: examine_file(root / name, name, ask)}, None, [], open=opened)
    return examine_tree(_tree(root, _inside(listing)), ask)


def _tree(root: Path, files: dict[str, HubFile]) -> Tree:
    """Return a repo's files as a `Tree`, as if they were in a folder on disk."""
    top = Folder(root, "")
    folders = {"": top}
    for path, file in sorted(files.items()):
        folder, parts = top, path.split("/")
        for part in parts[:-1]:
            rel = folder.join(part)
            if rel not in folders:
                folders[rel] = folder.folders[part] = Folder(folder.path / part, rel)
            folder = folders[rel]
        folder.files[parts[-1]] = file.size
    return Tree(root, top, list(folders.values()), [], {}, {})


def _downloaded(listing: Listing, config: HubConfig) -> Path:
    """Download the files; return their folder. Raises DiskError for a full disk, Unreachable for a failed download."""
    from huggingface_hub.constants import HF_HUB_CACHE

    cache = Path(HF_HUB_CACHE)
    nearest = next(p for p in (cache, *cache.absolute().parents) if p.exists())
    free = shutil.disk_usage(nearest).free
    if free < listing.bytes + _ROOM:
        raise DiskError(
            f"{listing.address.repo} has {listing.bytes:,} bytes; {nearest} has {free:,} free",
            "Set HF_HOME to a disk with enough space, or use level structure, which downloads only headers.",
        )
    try:
        return download(listing, config)
    except Exception as error:  # huggingface_hub raises errors from several libraries
        raise Unreachable(
            f"{listing.address.repo} could not be downloaded: {type(error).__name__}: {line(error, 160)}",
            "Try again: the download resumes.",
        ) from error


def _complete(listing: Listing, made: Report, address: str) -> Report:
    """Return the report with the repo's address. If the download lacks a listed file, the verdict is refuted."""
    here = {f.path for f in made.files}
    gone = [name for name in _inside(listing) if name not in here]
    bare = [name for name, f in _inside(listing).items() if f.sha256 is None]
    update: dict[str, object] = {"path": address}
    if gone and made.verdict is not Verdict.UNKNOWN:
        message = f"{len(gone):,} files that the Hub lists are missing after the download, such as {line(gone[0], 80)}"
        causes = gravest_first((*made.causes, Cause.DAMAGE))
        update |= {"verdict": Verdict.REFUTED, "problems": (*made.problems, message), "causes": causes}
    else:
        message = (
            f"all {len(here) - len(bare):,} large files have the sha256 that the Hub lists at {listing.commit[:12]}"
        )
        update |= {"proved": (*made.proved, message) if made.verdict is Verdict.PROVEN else made.proved}
    return made.model_copy(update=update)
