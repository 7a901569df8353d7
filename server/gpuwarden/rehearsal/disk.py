"""Store the files of rehearsal instances in real folders, laid out according to the profile's storage tiers.

```
<root>/instances/<id>/fs/         while the machine is on: the tiers at their mount paths
<root>/instances/<id>/fs.off/     the same folder while the machine is off, so that it can't be read
<root>/volumes/<tier>/            tiers that survive termination; linked into fs/ of every instance that has them
<root>/trash/                     content to delete
```
Wiping a tier moves its content to the trash, except the mount points of other tiers. Links that a job created are never
followed: the link is removed, but not its target.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from gpuwarden.core.profile import VOLATILE, Event, Profile, Tier


class Disk:
    """One instance's folders."""

    def __init__(self, root: Path, profile: Profile, id: str, tiers: tuple[Tier, ...]) -> None:  # noqa: A002
        self.root = root
        self.home = root / "instances" / id
        self.fs = self.home / "fs"
        self.off = self.home / "fs.off"
        self.run_root = run_root(profile)
        self.tiers = tiers

    def power_on(self) -> None:
        """Make the machine's files accessible and mount missing tiers."""
        if self.off.exists():
            trash(self.root, self.fs)  # files that were written while the machine was off
            self.off.rename(self.fs)
        for tier in self.tiers:
            at = PurePosixPath(tier.path)
            if not shared(tier):
                _real_folder(self.root, self.fs, at, self._links())
                continue
            volume = self._volume(tier)
            volume.mkdir(parents=True, exist_ok=True)
            parent = _real_folder(self.root, self.fs, at.parent, self._links())
            link = parent / at.name
            # The parent may be a link to another volume, so a relative link must start at the parent's real folder.
            target = os.path.relpath(os.path.realpath(volume), os.path.realpath(parent))
            if not link.is_symlink() or link.readlink() != Path(target):
                trash(self.root, link)
                link.symlink_to(target, target_is_directory=True)
        _real_folder(self.root, self.fs, PurePosixPath(self.run_root), self._links())

    def power_off(self) -> None:
        """Make the machine's files inaccessible."""
        if self.off.exists():
            trash(self.root, self.fs)
        elif self.fs.exists():
            self.fs.rename(self.off)

    def wipe(self, event: Event) -> None:
        """Delete the content of every tier that is not known to survive `event`."""
        base = self.off if self.off.exists() else self.fs
        own = {tier.path for tier in self.tiers}
        memory = [root.in_memory(at) for root in self.tiers if root.path == "/" for at in VOLATILE if at not in own]
        for tier in (*self.tiers, *memory):
            if getattr(tier.survives, event) is True:
                continue
            start, keep = self._volume(tier), set[Path]()
            if not shared(tier):
                start = _inside(base, tier.path)
                keep = {_inside(base, t.path) for t in self.tiers if t is not tier}
                if not _plain(self.root, base, start):
                    continue
            for entry in _doomed(start, keep):
                trash(self.root, entry)

    def erase(self) -> None:
        """Delete all of the instance's own files, but not its volumes."""
        trash(self.root, self.home)

    def allow_runs(self, allowed: bool) -> None:
        """Allow or forbid new run folders. This has no effect for root, which can always write."""
        folder = _inside(self.fs, self.run_root)
        if _plain(self.root, self.fs, folder):
            folder.chmod(0o755 if allowed else 0o555)

    def used(self) -> int:
        """Return the size of the files on the machine's own tiers, in bytes."""
        total = 0
        for at, _, names in os.walk(self.fs):
            for name in names:
                with suppress(OSError):
                    total += Path(at, name).lstat().st_size
        return total

    @property
    def mounts(self) -> dict[str, str]:
        """Return the real folder of each volume, keyed by the volume's path on the instance."""
        return {t.path: str(self._volume(t)) for t in self.tiers if shared(t)}

    def _volume(self, tier: Tier) -> Path:
        return self.root / "volumes" / tier.tier

    def _links(self) -> dict[Path, Path]:
        return {_inside(self.fs, t.path): self._volume(t) for t in self.tiers if shared(t)}


def run_root(profile: Profile) -> str:
    """Return the profile's run root as an absolute path; a rehearsal machine's home is /root."""
    return profile.run_root.replace("~", "/root", 1) if profile.run_root.startswith("~") else profile.run_root


def mounted(profile: Profile, *, durable: bool, sometimes: bool) -> tuple[Tier, ...]:
    """Return an instance's tiers, outer mounts first. If `sometimes` is true, include tiers that only some machines
    have.
    """
    perhaps = tuple(t for t in profile.storage if sometimes and t.present == "sometimes")
    return tuple(sorted((*profile.tiers(requested=durable), *perhaps), key=lambda t: len(PurePosixPath(t.path).parts)))


def shared(tier: Tier) -> bool:
    """Return whether a tier is a volume, which belongs to the account and survives the instance."""
    return tier.survives.terminate is True and tier.path != "/"


def trash(root: Path, path: Path) -> None:
    """Remove a file, folder or link immediately; `sweep` frees its space later."""
    if not os.path.lexists(path):
        return
    can = root / "trash"
    can.mkdir(exist_ok=True)
    if path.is_dir():
        _open_up(path)  # a folder without write permission can't be moved
    _open_up(path.parent)
    path.rename(can / secrets.token_hex(8))


def sweep(root: Path) -> None:
    """Free the disk space of deleted content. This can be interrupted and repeated safely."""
    can = root / "trash"
    for entry in list(can.iterdir()) if can.is_dir() else []:
        if entry.is_dir() and not entry.is_symlink():
            for at, folders, _ in os.walk(entry):
                for folder in folders:
                    _open_up(Path(at) / folder)
            _open_up(entry)
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def _open_up(path: Path) -> None:
    """Restore the owner's permissions on a folder after a job changed them."""
    try:
        if not path.is_symlink():
            path.chmod(stat.S_IRWXU)
    except OSError:
        return


def _inside(base: Path, path: str) -> Path:
    return base.joinpath(*PurePosixPath(path).parts[1:])


def _real_folder(root: Path, base: Path, path: PurePosixPath, links: dict[Path, Path]) -> Path:
    """Create `path` under `base` from real folders and the cloud's own links. Other files and links on the path are
    moved to the trash.
    """
    if base.is_symlink():
        trash(root, base)
    base.mkdir(parents=True, exist_ok=True)
    _open_up(base)
    at = base
    for part in path.parts[1:]:
        at = at / part
        if at in links and at.is_symlink() and at.resolve() == links[at].resolve():
            continue
        if at.is_symlink() or not at.is_dir():
            trash(root, at)
            at.mkdir()
        elif not os.access(at, os.R_OK | os.W_OK | os.X_OK):
            _open_up(at)
    return at


def _plain(root: Path, base: Path, path: Path) -> bool:
    """Return whether every folder from `base` to `path` is a real folder or a link to one of the cloud's volumes. Also
    make these folders writable.
    """
    if base.is_symlink() or not base.is_dir():
        return False
    _open_up(base)
    at = base
    for part in path.relative_to(base).parts:
        at = at / part
        foreign = at.is_symlink() and at.resolve().parent != (root / "volumes").resolve()
        if foreign or not at.is_dir():
            return False
        _open_up(at)
    return True


def _doomed(start: Path, keep: set[Path]) -> Iterator[Path]:
    """Yield the paths to remove from `start`, so that only the paths in `keep` and their parents remain."""
    _open_up(start)
    for entry in list(start.iterdir()) if start.is_dir() else []:
        if entry in keep:
            continue
        if any(entry in k.parents for k in keep) and entry.is_dir() and not entry.is_symlink():
            yield from _doomed(entry, keep)
        else:
            yield entry
