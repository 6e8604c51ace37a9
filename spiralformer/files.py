"""Reading and writing files: never half a file, never two writers, errors to act on."""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import json
import math
import os
import re
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from spiralformer.errors import UserError, first_line, shown

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")
PART, OLD = ".part", ".old"  # end the names of what is not complete yet, and of what it replaces
LARGEST = 1 << 26  # bytes of a file that is read at once, unless it may be larger
LARGEST_YAML = 1 << 17  # bytes, and values: more takes seconds
DEEPEST = 64  # lists and objects inside each other
MOST_DIGITS = 40  # of a whole number
CONFIGS = Path(__file__).parent / "configs"  # recipes and studies that come with the package


# ---------------------------------------------------------------------------- writing


@contextlib.contextmanager
def writing(path: str | Path, note: str = "") -> Iterator[None]:
    """What the system says against writing becomes a UserError; `note` is added to it."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename or path}: cannot be written: {error.strerror or error}"
            f"{note and '; ' + note}"
        ) from None


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A path to write to, beside `path`, that takes its place when complete: whoever reads sees the
    old file or the new one, whatever stops us."""
    path = Path(path)
    part = path.with_name(f".{path.name}{PART}")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield part
            _sync(part)
            os.replace(part, path)
            _sync(path.parent)
        finally:
            part.unlink(missing_ok=True)


def write_bytes(path: str | Path, content: bytes) -> None:
    with replacing(path) as part:
        part.write_bytes(content)


def write_text(path: str | Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: str | Path, content: Any) -> None:
    write_text(path, json_text(content, indent=1) + "\n")


def json_text(content: Any, indent: int | None = None) -> str:
    """JSON has neither infinity nor NaN: null stands for them."""
    return json.dumps(_finite(content), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def new_folder(folder: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """A folder to fill, that takes its name when complete. Another's work is never overwritten,
    unless it is ours to `replace`."""
    folder = Path(folder)
    part, old = (folder.with_name(f".{folder.name}{end}") for end in (PART, OLD))
    if not replace:
        require_free(folder)
    with writing(folder):
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            yield part
            if folder.exists():
                shutil.rmtree(old, ignore_errors=True)
                folder.rename(old)
            part.rename(folder)
            _sync(folder.parent)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Of processes that were killed while they wrote here. To be called where no other can be."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if re.fullmatch(rf"\..+({PART}|{OLD}|\.\d+)", path.name):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def require_free(folder: str | Path) -> None:
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists already; choose another name or remove it first")


def require_writable(folder: str | Path, note: str = "") -> None:
    """Makes it; better tried before long work than after."""
    with writing(folder, note):
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def require_folder(folder: str | Path, remedy: str = "") -> None:
    """Better asked before a heavy library is imported than after."""
    if not Path(folder).is_dir():
        raise UserError(f"{folder}: no such folder{remedy and '; ' + remedy}")


def _sync(path: Path) -> None:
    """A rename lasts when what it names, and the folder that holds the name, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------------- reading


def read_text(path: str | Path, largest: int = LARGEST) -> str:
    """The UTF-8 text of a file. A pipe would be waited for, a device may have no end: both are
    refused, but for those that the shell itself passes."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            passed = str(path).startswith(("/dev/stdin", "/dev/fd/"))
            if not passed and not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UserError(f"{path}: not a file")
            os.set_blocking(file.fileno(), True)
            content = file.read(largest + 1)
        if len(content) > largest:
            raise UserError(f"{path}: larger than {largest:,} bytes, the most that is read of it")
        return content.decode()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:  # ValueError: not text, or a zero byte in the name
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UserError(f"{path}: cannot be read: {reason}") from None


def read_json(path: str | Path, largest: int = LARGEST) -> dict[str, Any]:
    """The JSON object that a file holds."""
    content = parse_json(read_text(path, largest), path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object")
    return content


def read_record(path: str | Path, shape: type[T], largest: int = LARGEST) -> T:
    """What a file of JSON holds, as a dataclass, a pydantic model or another type says it must
    be."""
    return checked(read_json(path, largest), shape, path)


def parse_json(text: str | bytes, place: object) -> Any:
    try:
        content = json.loads(text, parse_int=_whole_number)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not JSON: {first_line(error)}") from None
    if not _bounded(content):
        raise UserError(f"{place}: more than {DEEPEST} lists or objects inside each other")
    return content


def read_yaml(path: str | Path) -> Any:
    """What a YAML file holds. Its size is that with all aliases written out."""
    import yaml

    loader = None
    try:
        loader = yaml.SafeLoader(read_text(path, LARGEST_YAML))
        node = loader.get_single_node()
        # Before the values are made: merges (<<) multiply what aliases stand for.
        if not _bounded(node, LARGEST_YAML):
            raise UserError(f"{path}: too deep, or its aliases stand for too much")
        return None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: cannot be read ({reason})") from None
    finally:
        if loader is not None:
            loader.dispose()


def checked(content: Any, shape: type[T], place: object) -> T:
    """The content as the shape has it; the message names the field that does not fit."""
    from pydantic import ValidationError

    try:
        return _adapter(shape).validate_python(content)  # type: ignore[arg-type]
    except ValidationError as error:
        raise UserError(f"{place}: {first_mistake(error)}") from None


def first_mistake(error: ValidationError, known: Sequence[str] = ()) -> str:
    """Field, value and what is wrong with it; `known` are names that a wrong one may stand for."""
    first = error.errors(include_url=False)[0]
    steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"]]
    place, problem = "".join(steps).removeprefix("."), first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(first["loc"][-1]), known, 1)
        return f"unknown field {shown(place)}" + (f"; did you mean {near[0]!r}?" if near else "")
    if first["type"] == "missing":
        return f"{place} is missing"
    if first["type"] == "value_error" or isinstance(first["input"], (dict, list)):
        return f"{place} {problem}".strip()
    return f"{place} {shown(first['input'])}: {problem[0].lower()}{problem[1:]}"


@functools.cache
def _adapter(shape: type[T]) -> TypeAdapter[T]:
    from pydantic import TypeAdapter

    return TypeAdapter(shape)


def _whole_number(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits")
    return int(digits)


def _bounded(content: Any, most: float = math.inf) -> bool:
    """Whether it holds no more than so many values, and none too deep inside others. It does not
    recurse, and stops counting there, however often YAML repeats a part."""
    count, level = 0, [content]
    for _ in range(DEEPEST):
        inner: list[Any] = []
        for value in level:
            value = getattr(value, "value", value)  # of a node of YAML
            if isinstance(value, (dict, list, tuple)):
                inner += value.values() if isinstance(value, dict) else value
            if count + len(inner) > most:
                return False
        if not inner:
            return True
        count, level = count + len(inner), inner
    return False


def inside(folder: str | Path, name: Any) -> Path:
    """The file of that name in a folder. A name from a file of others may be any text: one that is
    not plain, or is a link that leads out of the folder, is refused."""
    folder = Path(folder)
    plain = isinstance(name, str) and name.isprintable() and name not in ("", "..")
    if not plain or Path(name).name != name:
        raise UserError(f"{folder}: {name!r} is not the name of a file in it")
    path = folder / name
    if path.is_symlink() and not _leads_inside(path):
        raise UserError(f"{path}: a link that leads out of the folder; put the file itself there")
    return path


def _leads_inside(link: Path) -> bool:
    """The Hub's cache keeps the files of `snapshots/REVISION` in `blobs` beside them."""
    try:
        home, target = link.parent.resolve(), link.resolve()
    except (OSError, RuntimeError):  # it leads to itself
        return False
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    return target.is_relative_to(home) or target.is_relative_to(blobs)


def packaged_config(name: str) -> str:
    """The file that `stdlib`, `stdlib.yaml` or `configs/stdlib.yaml` means, where the package has
    one and the working folder does not; any other path or name as it is."""
    if not Path(name).exists():
        bare = name.removeprefix("configs/")
        for file in (CONFIGS / bare, CONFIGS / f"{bare}.yaml"):
            if file.is_file():
                return str(file)
    return name


def digest(content: Any) -> str:
    """Sixteen hexadecimal digits that stand for a file (a Path), bytes, or what JSON can say."""
    if isinstance(content, Path):
        with open(content, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    if not isinstance(content, bytes):
        content = json.dumps(content, sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()[:16]


# ---------------------------------------------------------------------------- one at a time


@contextlib.contextmanager
def locked(path: str | Path, doing: str, remedy: str, timeout: float = 0) -> Iterator[None]:
    """Holds the lock file `path`. The system lets go of it when this process ends, however it does.

    Where another process has it for longer than `timeout` seconds: "process 7 on host is `doing`
    here; `remedy`"."""
    from filelock import FileLock, Timeout

    path = Path(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path, timeout=timeout)
        try:
            lock.acquire()
        except Timeout:
            holder = ""
            with contextlib.suppress(OSError):
                holder = path.read_text(encoding="utf-8").strip()
            raise UserError(
                f"{path.parent}: {holder or 'another process'} is {doing} here; {remedy}"
            ) from None
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
    try:
        yield
    finally:
        lock.release()


def cache_folder() -> Path:
    """Where this user's caches of this package live; nobody else may write there."""
    home = Path.home()
    base = {"darwin": home / "Library" / "Caches", "win32": home / "AppData" / "Local"}.get(
        sys.platform, Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    )
    folder = base / "spiralformer"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        about = folder.stat()
    if hasattr(os, "getuid") and (about.st_uid != os.getuid() or about.st_mode & 0o022):
        raise UserError(
            f"{folder}: others can write there; remove it, or set XDG_CACHE_HOME to another folder"
        )
    return folder
