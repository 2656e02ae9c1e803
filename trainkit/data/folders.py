"""Folders of data sets: how they are listed, which names in them are refused, which paths lead out of them."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Set
from pathlib import Path, PurePosixPath

from trainkit.errors import UserError, listing, number_of
from trainkit.files import Json

_UNWRITABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_DEPTH = 16
_OF_SYSTEMS = frozenset(
    {
        *("thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r", "__macosx", "lost+found"),
        *("$recycle.bin", "system volume information", "found.000"),
        *("@eadir", "#recycle", "#snapshot", "@recycle", "@recently-snapshot"),
    }
)
"""What Windows, macOS, file servers and file systems put into folders, beside names that begin with a dot."""
SPLITS = {
    "train": ("train", "training"),
    "val": ("val", "validation", "valid", "dev"),
    "test": ("test", "testing"),
}
"""Names that a split goes by."""
SPLIT_NAMES = frozenset(name for names in SPLITS.values() for name in names)
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def is_hidden(name: str) -> bool:
    """Return whether a file or folder found in a folder is none of a set: `._0.png`, `.DS_Store`, `Thumbs.db`.

    This is the rule wherever a folder is listed. A file that a user or a list names is read, whatever its name.
    """
    return name.startswith(".") or name.lower() in _OF_SYSTEMS


def visible(files: Iterable[Path]) -> list[Path]:
    """Return the files that are not hidden, in the order of their names."""
    return sorted(file for file in files if not is_hidden(file.name))


def is_writable(name: str) -> bool:
    """Return whether a name fits a line of a UTF-8 text: no control character, and no byte that is not UTF-8."""
    return _UNWRITABLE.search(name) is None


def escaped(name: str) -> str:
    """Replace what keeps a name from being written by its escape, as bash takes it in $'...': `caf\\xe9`."""
    return _UNWRITABLE.sub(lambda found: _escape(ord(found[0])), name)


def _escape(code: int) -> str:
    # Python reads the byte 0xE9 that is not UTF-8 as the surrogate 0xDCE9.
    code = code - 0xDC00 if (byte := 0xDC80 <= code <= 0xDCFF) else code
    return f"\\x{code:02x}" if byte or code < 0x80 else f"\\u{code:04x}"


def check_names(where: str, names: Iterable[str], remedy: str = "") -> None:
    """Raise UserError for names, or parts of paths, that tables and lists could not hold; all are counted."""
    if bad := dict.fromkeys(_first_bad(name) for name in names if not is_writable(name)):
        found = f"{number_of(len(bad), 'names')} not in UTF-8, or with control characters"
        remedy = remedy or "rename them; in bash, write the listed name inside $'...'"
        raise UserError(escaped(where), f"{found}:{listing(map(escaped, bad))}\n", "names in UTF-8 on one line", remedy)


def _first_bad(path: str) -> str:
    """Cut a path after its first part that cannot be written: a folder is one error, whatever is in it."""
    parts = path.split("/")
    end = next(place for place, part in enumerate(parts) if not is_writable(part))
    return "/".join(parts[: end + 1])


def walk(root: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """List a folder and those below it, links followed: path below `root`, names of folders in it, all other names.

    Names are in order, and hidden ones left out. A folder that the caller takes from the list is not entered.
    Raises UserError where a folder cannot be read, lies within itself, or is too deep.
    """

    def enter(below: str, above: tuple[tuple[int, int], ...]) -> Iterator:
        place = os.path.join(root, below)
        seen = os.stat(place)
        here = (seen.st_dev, seen.st_ino)
        if here in above or len(above) > _DEPTH:
            raise UserError(place, "a folder within itself, or too deep", f"at most {_DEPTH} levels")
        inner: list[str] = []
        rest: list[str] = []
        with os.scandir(place) as entries:
            for entry in entries:
                name = entry.name
                # As `is_hidden`, which called for each of a million names takes as long as listing them.
                if name[0] != "." and name.lower() not in _OF_SYSTEMS:
                    (inner if _is_folder(entry) else rest).append(name)
        inner.sort()
        rest.sort()
        yield below, inner, rest
        for name in inner:
            yield from enter(f"{below}/{name}" if below else name, (*above, here))

    try:
        yield from enter("", ())
    except OSError as error:
        raise UserError(
            str(error.filename or root), f"cannot be read ({error.strerror or error})", "a folder of files"
        ) from None


def folders_in(root: Path) -> dict[str, Path]:
    """Return the folders in a folder by their names, in order, without hidden ones. Raises UserError as `walk`."""
    return {name: root / name for name in next(walk(root))[1]}


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def size_of(path: Path, where: str, expected: str) -> int:
    """Return the bytes of a file. Raises UserError where there is none, or a folder, pipe, socket or device."""
    try:
        seen = path.stat()
    except OSError as error:
        gone = isinstance(error, FileNotFoundError) and path.is_symlink()
        found = "a broken link" if gone else f"cannot be read ({error.strerror or error})"
        raise UserError(where, found, expected) from None
    if not stat.S_ISREG(seen.st_mode):
        raise UserError(where, _KINDS.get(stat.S_IFMT(seen.st_mode), "no file"), expected)
    return seen.st_size


def leads_out(root: Path, path: str) -> bool:
    """Return whether a path below `root` ends outside of it, by `..` or a link."""
    return not (root / path).resolve().is_relative_to(root.resolve())


class Listing:
    """Names in the folders below a root, each listed once: asking file by file takes a network's disk minutes."""

    def __init__(self, root: Path):
        self.root = root
        self._there: dict[str, dict[str, os.DirEntry[str]]] = {}
        self._out: dict[str, bool] = {}

    def names(self, folder: str) -> Set[str]:
        """Return the names in a folder; none where it is not there. Raises UserError where it cannot be read."""
        return self._entries(folder).keys()

    def _entries(self, folder: str) -> dict[str, os.DirEntry[str]]:
        if folder not in self._there:
            place = f"{self.root}/{folder}"
            try:
                with os.scandir(place) as entries:
                    self._there[folder] = {entry.name: entry for entry in entries}
            except (FileNotFoundError, NotADirectoryError):
                self._there[folder] = {}
            except OSError as error:
                found = f"cannot be read ({error.strerror or error})"
                raise UserError(place, found, "a folder of images") from None
        return self._there[folder]

    def has_file(self, path: str) -> bool:
        """Return whether there is a file at a path."""
        folder, _, name = path.rpartition("/")
        entry = self._entries(folder).get(name)
        return entry is not None and entry.is_file()

    def leads_out(self, path: str) -> bool:
        """Return whether a link on the way to a file leads out of the root: each folder is asked once."""
        folder, _, name = path.rpartition("/")
        if folder not in self._out:
            self._out[folder] = leads_out(self.root, folder)
        entry = self._entries(folder).get(name)
        return self._out[folder] or (entry is not None and entry.is_symlink() and leads_out(self.root, path))


def listed_path(name: str, root: Path) -> str | None:
    """Return a path of a list as one below the root, None where it is not."""
    if not is_writable(name):
        return None
    if not {"", ".", ".."} & set(name.split("/")):
        return name
    pure = PurePosixPath(name)
    if pure.is_absolute():
        try:
            pure = pure.relative_to(root.as_posix())
        except ValueError:
            return None
    return pure.as_posix() if pure.parts and ".." not in pure.parts else None


def inside(root: Path, name: str, where: str) -> Path:
    """Return the file `name` in the folder `root`. Raises UserError where the name, or a link, leads out of it."""
    if not name or not is_writable(name) or Path(name).is_absolute() or leads_out(root, name):
        raise UserError(where, repr(name)[:200], f"a path inside {root}")
    return root / name


def read_text(file: Path, most: int, expected: str) -> str:
    """Read a text file in UTF-8 of at most so many bytes. Raises UserError where it cannot be read."""
    try:
        if (size := size_of(file, str(file), expected)) > most:
            raise UserError(str(file), f"{size} bytes", f"at most {most}: {expected}")
        return file.read_text("utf-8-sig")
    except (OSError, ValueError) as error:
        raise UserError(str(file), f"cannot be read ({error})"[:300], expected) from None


def read_json(file: Path, most: int, expected: str, kind: type = object) -> Json:
    """Read a JSON file of at most so many bytes that holds a `kind`. Raises UserError where it cannot be read."""
    text = read_text(file, most, expected)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(str(file), f"cannot be read ({error})"[:300], expected) from None
    if not isinstance(value, kind):
        raise UserError(str(file), f"a {type(value).__name__}", expected)
    return value
