"""A folder that is filled with files of others' naming, on a volume that others may use too.

Every file is reached from a descriptor of the folder, one component after the other, and no symbolic link is
followed on the way: whatever keys a store lists and whatever lies in the folder, nothing outside it is touched.
What is not finished is in one subfolder, on the same filesystem, so that finishing is a rename.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from streamer.checkpoint.partial import WORK_FOLDER
from streamer.errors import DestinationError, NoSpaceError, StreamError

__all__ = ["WORK_FOLDER", "Destination", "Room", "telling"]

_LOCK = "lock"
_POLL_SECONDS = 0.2
#: What filesystems without locks answer.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_KEPT = "what has arrived is kept, and the same command goes on from there"
_REMEDIES = {
    errno.ENOSPC: f"make room on the volume; {_KEPT}",
    errno.EDQUOT: f"raise the quota; {_KEPT}",
    errno.EROFS: "mount the volume for writing",
    errno.EACCES: "run as a user who may write there, or set fsGroup",
    errno.EPERM: "run as a user who may write there, or set fsGroup",
    errno.ELOOP: "a symbolic link is in the way; remove it, or give another folder",
    errno.ENOTDIR: "a file or a symbolic link is where a folder should be; remove it, or give another folder",
    errno.EISDIR: "a folder is where a file should be; remove it, or give another folder",
    errno.EFBIG: "the filesystem, or `ulimit -f`, does not allow files of this size",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENOENT: "somebody else removed it, or has finished it; run the same command again",
    errno.EXDEV: "another volume is mounted inside the folder",
}


@contextlib.contextmanager
def telling(what: str) -> Iterator[None]:
    """Turn an error of the filesystem into ours.

    Args:
        what: was being done, to which file.

    Raises:
        NoSpaceError, DestinationError: instead of an OSError.
    """
    try:
        yield
    except StreamError:
        raise
    except OSError as error:
        kind = NoSpaceError if error.errno in (errno.ENOSPC, errno.EDQUOT) else DestinationError
        raise kind(
            f"cannot {what}: {error.strerror or error}", hint=_REMEDIES.get(error.errno or 0, "look at the volume")
        ) from error


@dataclass(frozen=True, slots=True)
class Room:
    """What a filesystem has left for us.

    Attributes:
        nbytes: free.
        inodes: free; None where they are not counted.
        block_bytes: every file takes a multiple of it.
    """

    nbytes: int
    inodes: int | None
    block_bytes: int


class Destination:
    """A folder and what happens in it; a context manager. It is made if it is not there.

    Files that we make can be read by everybody, whatever the umask, for the engine may be another user than the
    init container; who may write is the umask's to say.

    Raises:
        DestinationError: see `streamer.errors`; so do all methods.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stack = contextlib.ExitStack()
        with telling(f"use the folder {path}"), contextlib.ExitStack() as stack:
            _make_with_parents(path)
            # The folder itself may be a link: whoever runs us has named it.
            self._root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, self._root)
            _make_folder(self._root, WORK_FOLDER)
            self.work = os.open(WORK_FOLDER, _FOLDER, dir_fd=self._root)
            stack.callback(os.close, self.work)
            self._stack = stack.pop_all()
        self.is_locked = False

    def __enter__(self) -> Destination:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def lock(self, on_wait: Callable[[], None]) -> None:
        """Wait until nobody else fills the folder, as far as the filesystem has locks; they end with their process.

        Args:
            on_wait: called once, if somebody does.
        """
        with telling(f"lock {self.path}"):
            descriptor = os.open(
                _LOCK, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=self.work
            )
            self._stack.callback(os.close, descriptor)
            _let_read(descriptor, 0o444)
            while not self.is_locked:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self.is_locked = True
                except BlockingIOError:
                    on_wait()
                    on_wait = _nothing
                    time.sleep(_POLL_SECONDS)
                except OSError as error:
                    if error.errno not in _NO_LOCKS:
                        raise
                    return

    def room(self) -> Room:
        """Return what is left on the filesystem."""
        with telling(f"look at the volume of {self.path}"):
            found = os.fstatvfs(self._root)
        block = found.f_frsize or found.f_bsize
        return Room(found.f_bavail * block, found.f_favail if found.f_files else None, block)

    # -- finished files --------------------------------------------------------------------------------

    def status(self, key: str) -> os.stat_result | None:
        """Return the status of a finished file, or None if there is none."""
        with telling(f"look at {self.path / key}"):
            try:
                with self._parent(key) as (folder, name):
                    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError:
                return None
        if not stat.S_ISREG(found.st_mode):
            kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "no file"
            raise DestinationError(f"{self.path / key} is {kind}", hint="remove it, or give another folder")
        return found

    def publish(self, part: str, key: str) -> None:
        """Give a part its name, durably."""
        with telling(f"write {self.path / key}"), self._parent(key, make=True) as (folder, name):
            os.rename(part, name, src_dir_fd=self.work, dst_dir_fd=folder)
            os.fsync(folder)

    def remove(self, key: str) -> None:
        """Remove a finished file, and the folders that are empty without it."""
        with telling(f"remove {self.path / key}"):
            with contextlib.suppress(FileNotFoundError), self._parent(key) as (folder, name):
                os.unlink(name, dir_fd=folder)
            while "/" in key:
                key = key.rpartition("/")[0]
                try:
                    with self._parent(key) as (folder, name):
                        os.rmdir(name, dir_fd=folder)
                except OSError:
                    return  # somebody else's files are in it

    def write(self, name: str, body: bytes) -> None:
        """Write a small file at the top, at once or not at all."""
        with telling(f"write {self.path / name}"):
            unfinished = (
                f"{name}.{os.getpid()}.{time.monotonic_ns():x}"  # processes of other pods have the same numbers
            )
            descriptor = self.open_part(unfinished, os.O_CREAT | os.O_EXCL)
            try:
                with open(descriptor, "wb") as file:
                    file.write(body)
                    file.flush()
                    os.fsync(descriptor)
                os.rename(unfinished, name, src_dir_fd=self.work, dst_dir_fd=self._root)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(unfinished, dir_fd=self.work)
                raise
            os.fsync(self._root)

    def withdraw(self, name: str, as_part: str) -> None:
        """Move a file from the top to the parts, durably, unless somebody else just has."""
        with telling(f"move {self.path / name}"), contextlib.suppress(FileNotFoundError):
            os.rename(name, as_part, src_dir_fd=self._root, dst_dir_fd=self.work)
            os.fsync(self._root)

    @contextlib.contextmanager
    def _parent(self, key: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """Yield a descriptor of the folder that `key` is in, and its name there."""
        *folders, name = key.split("/")
        if {"", ".", ".."} & {*folders, name}:  # a marker that somebody tampered with may say anything
            raise DestinationError(f"{key!r} is no path inside {self.path}", hint="remove what names it there")
        with contextlib.ExitStack() as stack:
            current = self._root
            for folder in folders:
                if make:
                    _make_folder(current, folder)
                current = os.open(folder, _FOLDER, dir_fd=current)
                stack.callback(os.close, current)
            yield current, name

    # -- parts -----------------------------------------------------------------------------------------

    def open_part(self, name: str, flags: int = 0) -> int:
        """Return a descriptor of an unfinished file."""
        descriptor = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o666, dir_fd=self.work)
        _let_read(descriptor, 0o444)
        return descriptor

    def parts(self) -> dict[str, os.stat_result]:
        """Return the unfinished files, by name."""
        with telling(f"look into {self.path / WORK_FOLDER}"):
            found = {}
            for name in os.listdir(self.work):
                with contextlib.suppress(FileNotFoundError):
                    found[name] = os.stat(name, dir_fd=self.work, follow_symlinks=False)
            found.pop(_LOCK, None)
            return found

    def remove_part(self, name: str) -> None:
        """Remove an unfinished file, if it is there."""
        with telling(f"remove {self.path / WORK_FOLDER / name}"), contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.work)


def _nothing() -> None:
    pass


def _let_read(descriptor: int, bits: int) -> None:
    """Add permissions, where the filesystem has any to give."""
    mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
    if mode & bits != bits:
        with contextlib.suppress(OSError):
            os.fchmod(descriptor, mode | bits)


def _make_folder(parent: int, name: str) -> None:
    try:
        os.mkdir(name, 0o777, dir_fd=parent)
    except FileExistsError:
        return
    made = os.open(name, _FOLDER, dir_fd=parent)
    try:
        _let_read(made, 0o555)
        os.fsync(parent)
    finally:
        os.close(made)


def _make_with_parents(path: Path) -> None:
    if path.is_dir():
        return
    _make_with_parents(path.parent)
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _make_folder(parent, path.name)
    finally:
        os.close(parent)
