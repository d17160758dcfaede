"""A folder that appears whole: filled under a temporary name, then renamed into place.

A process that is killed leaves its temporary folder behind; the next one for the same target removes it. A file lock
held while filling tells a dead process's folder from a living one's.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from ..model.errors import ModelError
from ..model.writer import sync_folder
from .lock import Lock, locked_elsewhere

LOCK = "in-use.lock"


class Staging:
    """`with Staging(target, last) as folder:` fill `folder`.

    On success its files are under `target`, else nothing is.

    A target that does not exist is made by one rename. Into one that exists files are renamed one by one, `last` the
    last.
    """

    def __init__(self, target: Path, last: str) -> None:
        self.target, self.last = target.absolute(), last
        self.made: list[Path] = []  # parents that we made

    def __enter__(self) -> Path:
        try:
            self.inside = self.target.exists()
            place = self.target if self.inside else self.target.parent
            self._make(place)
            prefix = f".{self.target.name}."
            for left in place.glob(f"{_quoted(prefix)}*.partial"):
                if left.is_dir() and not locked_elsewhere(left / LOCK):
                    shutil.rmtree(left, ignore_errors=True)
            self.folder = Path(tempfile.mkdtemp(prefix=prefix, suffix=".partial", dir=place))
        except OSError as error:
            self._unmake()
            raise ModelError(f"{self.target}: cannot be made ({error.strerror})") from error
        self.lock = Lock(self.folder / LOCK)
        self.lock.acquire()
        return self.folder

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        done = False
        try:
            if kind is None:
                self._publish()
                done = True
        finally:
            self.lock.release()
            shutil.rmtree(self.folder, ignore_errors=True)
            if not done:
                self._unmake()
        if isinstance(error, OSError):
            raise ModelError(f"{self.target}: cannot be written ({error.strerror})") from error

    def _publish(self) -> None:
        (self.folder / LOCK).unlink(missing_ok=True)
        names = sorted((path.name for path in self.folder.iterdir()), key=lambda name: (name == self.last, name))
        for name in names:
            _sync(self.folder / name)
        try:
            if not self.inside:
                os.chmod(self.folder, 0o777 & ~_umask())
                try:
                    os.rename(self.folder, self.target)
                    sync_folder(self.target.parent)
                    return
                except OSError:
                    self.target.mkdir(exist_ok=True)  # somebody made it meanwhile: go on file by file
            for name in names:
                os.replace(self.folder / name, self.target / name)
            sync_folder(self.target)
        except OSError as error:
            raise ModelError(f"{self.target}: cannot be written ({error.strerror})") from error

    def _make(self, folder: Path) -> None:
        missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
        for parent in reversed(missing):
            parent.mkdir(exist_ok=True)
            self.made.append(parent)

    def _unmake(self) -> None:
        for folder in reversed(self.made):
            try:
                folder.rmdir()
            except OSError:  # not ours alone any more
                return


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _quoted(text: str) -> str:
    """`text` with what glob would read as a pattern put in brackets."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in text)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
