"""Where text comes from: files and folders, Hugging Face datasets, the standard library. All of it
becomes one sequence of documents in an order that does not depend on the machine."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import json
import os
import platform
import re
import sys
import sysconfig
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from spiralformer.errors import UserError, first_line
from spiralformer.machine import require_package

KINDS = {
    **dict.fromkeys((".txt", ".md", ".rst", ".py"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    ".json": "json",
    ".parquet": "parquet",
}
COMPRESSIONS = (".gz", ".zst")

LOOK = 1 << 16  # bytes by which a file of another name is judged to be text or not
WHOLE_FILE_LIMIT = 1 << 20  # a text up to this size is one document under the `auto` rule
AUTO_DOCUMENT_SIZE = 1 << 16  # a larger one is cut into documents of about this size
LONGEST_RECORD = 1 << 29  # bytes of a line of JSON, or of a whole .json file
LONGEST_DOCUMENT = 1 << 23  # characters: what a tokenizer makes of more takes too much memory


# ---------------------------------------------------------------- which documents there are


@dataclass(frozen=True)
class Source:
    """One file, Hugging Face dataset or embedded corpus."""

    kind: str  # a key of READERS
    name: str  # as shown to the user
    path: Path | None = None
    size: int | None = None  # bytes to read, where known: for the time left
    identity: dict[str, Any] = field(default_factory=dict)
    """What tells this source from an edited one. The folder that it lies in is not part of it."""


def find_sources(
    arguments: list[str], notice: Callable[[str], None] = lambda message: None
) -> list[Source]:
    """The sources that command-line arguments name: files, folders, `hf:NAME`, `stdlib`. What a
    folder holds besides text is left out, and `notice` is told."""
    sources: list[Source] = []
    for argument in arguments:
        if argument == "stdlib":
            sources.append(_stdlib_source())
        elif argument.startswith("hf:"):
            sources.append(_hugging_face_source(argument))
        elif Path(argument).is_dir():
            sources.extend(_folder_sources(Path(argument), notice))
        else:
            sources.append(_file_source(Path(argument), Path(argument).name))
    return sources


def _folder_sources(folder: Path, notice: Callable[[str], None]) -> list[Source]:
    sources, left_out = [], Counter[str]()
    for path in _files_below(folder, left_out):
        source = _file_source(path, path.relative_to(folder).as_posix())
        if _kind(path) or _looks_like_text(source):
            sources.append(source)
        else:
            left_out[path.suffix.lower() or "without extension"] += 1
    described = ", ".join(f"{number} {what}" for what, number in left_out.most_common())
    if not sources:
        raise UserError(f"{folder}: no text in this folder ({described or 'it is empty'})")
    if described:
        notice(f"{folder}: left out {described}")
    return sources


def _files_below(folder: Path, left_out: Counter[str]) -> list[Path]:
    def fail(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}")

    files = []
    for parent, folders, names in os.walk(folder, onerror=fail):
        for path in (Path(parent, name) for name in (*folders, *names)):
            if path.name.startswith("."):
                left_out["hidden"] += 1
            elif path.is_file():
                files.append(path)
            elif path.is_symlink() or not path.is_dir():  # a link to a folder may lead in circles
                left_out["links or devices"] += 1
        folders[:] = [name for name in folders if not name.startswith(".")]
    return sorted(files)


def _file_source(path: Path, name: str) -> Source:
    try:
        if path.exists() and not path.is_file():  # to open a pipe would wait for its writer
            raise UserError(f"{path}: neither a file nor a folder; write its text to a file first")
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file or folder (other sources: hf:NAME, stdlib)"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if _kind(path) == "parquet" or path.suffix.lower() == ".zst":
        require_package("pyarrow", f"reading {path}", "data")
    identity = {"file": name, "size": status.st_size, "mtime_ns": status.st_mtime_ns}
    return Source(_kind(path) or "text", str(path), path, status.st_size, identity)


def _kind(path: Path) -> str | None:
    """What a file's name says it holds."""
    inner = Path(path.stem) if path.suffix.lower() in COMPRESSIONS else path
    return KINDS.get(inner.suffix.lower())


def _looks_like_text(source: Source) -> bool:
    try:
        with _opened(source) as (stream, _):
            head = stream.read(LOOK)
        # Where the file goes on, the last character may be cut.
        codecs.getincrementaldecoder("utf-8")().decode(head, final=len(head) < LOOK)
    except (UnicodeDecodeError, UserError):
        return False
    return b"\0" not in head


def _hugging_face_source(argument: str) -> Source:
    match = re.fullmatch(r"hf:([^:,]+)(?:,([^:,]+))?(?::([^:,]+))?", argument)
    if not match:
        raise UserError(f"{argument}: not of the form hf:NAME[,CONFIG][:SPLIT]")
    require_package("datasets", f"reading {argument}", "data")
    name, config, split = match.groups()
    identity = {"dataset": name, "config": config, "split": split or "train"}
    return Source("hf", argument, identity=identity)


# Tests, packages of others that are only bundled or installed there, and tables: of code pages, of
# characters, of help texts. None of it reads like a program.
_NOT_STDLIB = {
    *("test", "tests", "idle_test", "_bundled", "site-packages", "dist-packages"),
    *("encodings", "pydoc_data", "entities.py", "stringprep.py", "_casefix.py"),
}
_MADE_BY_THE_BUILD = ("_sysconfigdata", "config-", "__phello__")


def stdlib_files() -> list[Path]:
    """The sources of the running Python's standard library that one would read, by name."""

    def wanted(name: str) -> bool:
        return name not in _NOT_STDLIB and not name.startswith(_MADE_BY_THE_BUILD)

    files = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = filter(wanted, folders)  # the others are not even looked into
        files += [Path(folder, name) for name in filter(wanted, names) if name.endswith(".py")]
    return sorted(files, key=lambda path: path.as_posix())


def _stdlib_source() -> Source:
    contents = [path.read_bytes() for path in stdlib_files()]
    digest = hashlib.sha256(b"".join(contents)).hexdigest()
    identity = {"stdlib": platform.python_version(), "sha256": digest}
    return Source("stdlib", "stdlib", size=sum(map(len, contents)), identity=identity)


# ---------------------------------------------------------------- reading them


class Document(NamedTuple):
    text: str | None  # None: unreadable, and `skip_bad` was asked for
    consumed: int  # bytes of the source read so far, for the time left


@dataclass(frozen=True)
class ReadOptions:
    text_field: str = "text"
    split_documents: str = "auto"
    skip_bad: bool = False
    longest: int = sys.maxsize  # characters; a longer document is cut into several
    notice: Callable[[str], None] = lambda message: None


def read_documents(source: Source, options: ReadOptions) -> Iterator[Document]:
    """The documents of one source, in order. Bad input raises `UserError` with its place."""
    said = False
    for document in READERS[source.kind](source, options):
        text, consumed = document
        if text is None or len(text) <= options.longest:
            yield document
            continue
        if not said:
            options.notice(
                f"{source.name}: a document of {len(text):,} characters, and any other of more "
                f"than {options.longest:,}, is cut into several"
            )
            said = True
        for start in range(0, len(text), options.longest):
            yield Document(text[start : start + options.longest], consumed)


def _bad(problem: str, options: ReadOptions) -> str | None:
    """In place of a text that cannot be had: an error, unless such may be left out."""
    if options.skip_bad:
        return None
    remedy = "mend it, or leave such out with `spiralformer data --skip-bad`"
    raise UserError(f"{problem}; {remedy}") from None


def _text_documents(source: Source, options: ReadOptions) -> Iterator[Document]:
    size = document_size(options.split_documents)
    if size is None and _is_larger(source, WHOLE_FILE_LIMIT):  # auto
        size = AUTO_DOCUMENT_SIZE
    if (size or sys.maxsize) > options.longest and _is_larger(source, options.longest):
        size = options.longest // 4  # which `cut` may exceed fourfold
        options.notice(f"{source.name}: cut into documents of {size:,} bytes or some more")
    offset = 0
    with _opened(source) as (stream, consumed):
        for data in cut(stream, size or sys.maxsize):
            try:
                text: str | None = data.decode()
            except UnicodeDecodeError as error:
                text = _bad(f"{source.name}: not UTF-8 at byte {offset + error.start}", options)
            offset += len(data)
            yield Document(text, consumed())


def _is_larger(source: Source, size: int) -> bool:
    with _opened(source) as (stream, _):
        return len(stream.read(size + 1)) > size


def _stdlib_documents(source: Source, options: ReadOptions) -> Iterator[Document]:
    consumed = 0
    for path in stdlib_files():
        data = path.read_bytes()
        consumed += len(data)
        yield Document(data.decode(), consumed)


# ---------------------------------------------------------------- records with a field of text


def _record(record: Any, place: str, consumed: int, options: ReadOptions) -> Document:
    """The text of a record; bytes are JSON."""
    field = options.text_field
    try:
        content = json.loads(record) if isinstance(record, bytes) else record
        if not isinstance(content, dict):
            raise ValueError("not a JSON object")
        if field not in content:
            names = ", ".join(content)[:200] or "none"
            raise ValueError(f"no field {field!r} (fields here: {names})")
        text = "" if content[field] is None else content[field]
        if not isinstance(text, str):
            raise ValueError(f"field {field!r} is {type(text).__name__}, not text")
        text.encode()
    except UnicodeEncodeError:
        problem = f"field {field!r} has half a surrogate pair"
    except UnicodeDecodeError:
        problem = "not UTF-8"
    except json.JSONDecodeError as error:
        problem = f"not valid JSON ({error.msg} at column {error.colno})"
    except RecursionError:
        problem = "nested too deeply"
    except ValueError as error:
        problem = str(error)
    else:
        return Document(text, consumed)
    return Document(_bad(f"{place}: {problem}", options), consumed)


def _jsonl_documents(source: Source, options: ReadOptions) -> Iterator[Document]:
    number = 0
    with _opened(source) as (stream, consumed):
        while line := stream.readline(LONGEST_RECORD + 1):
            number += 1
            place = f"{source.name}:{number}"
            if len(line) > LONGEST_RECORD:
                text = _bad(f"{place}: a line of more than {LONGEST_RECORD:,} bytes", options)
                yield Document(text, consumed())
                while line and not line.endswith(b"\n"):
                    line = stream.readline(LOOK)
            elif line.strip():
                yield _record(line, place, consumed(), options)


def _json_documents(source: Source, options: ReadOptions) -> Iterator[Document]:
    """Records, one a line or in a list. Any other JSON (settings, a notebook) is a text."""
    with _opened(source) as (stream, _):
        first, more = stream.readline(LONGEST_RECORD + 1), stream.read(1)
        if more and first.startswith(b"{") and first.rstrip().endswith(b"}"):
            yield from _jsonl_documents(source, options)
            return
        data = first + more + stream.read(LONGEST_RECORD)
    if len(data) > LONGEST_RECORD:
        problem = f"more than {LONGEST_RECORD:,} bytes of one JSON text; write a record a line"
        yield Document(_bad(f"{source.name}: {problem}", options), source.size or 0)
        return
    try:
        content = json.loads(data) if data.strip() else None
    except (ValueError, RecursionError):
        content = [data]  # to be reported as a record
    if isinstance(content, dict) and options.text_field in content:
        content = [content]
    if isinstance(content, list) and content and isinstance(content[0], (dict, bytes)):
        for number, record in enumerate(content):
            yield _record(record, f"{source.name}, record {number}", source.size or 0, options)
    else:
        yield from _text_documents(source, options)


def _parquet_documents(source: Source, options: ReadOptions) -> Iterator[Document]:
    import pyarrow as arrow
    from pyarrow import parquet

    row = 0
    try:
        with _opened(source) as (stream, _):
            file = parquet.ParquetFile(stream)
            columns = file.schema_arrow.names
            if options.text_field not in columns:
                raise UserError(
                    f"{source.name}: no column {options.text_field!r} (columns here: "
                    f"{', '.join(columns)})"
                )
            for batch in file.iter_batches(1024, columns=[options.text_field]):
                for record in batch.to_pylist():
                    consumed = (source.size or 0) * row // file.metadata.num_rows
                    yield _record(record, f"{source.name}, row {row}", consumed, options)
                    row += 1
    except (arrow.ArrowException, UnicodeDecodeError) as error:
        raise UserError(
            f"{source.name}: not a complete Parquet file ({first_line(error)}); fetch it anew"
        ) from None


def _hugging_face_documents(source: Source, options: ReadOptions) -> Iterator[Document]:
    import datasets

    name, config, split = source.identity.values()
    try:
        rows = datasets.load_dataset(name, config, split=split, streaming=True)
        for number, row in enumerate(rows):
            yield _record(row, f"{source.name}, row {number}", 0, options)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"{source.name}: cannot be read; check the name and the network: {first_line(error)}"
        ) from None


READERS = {
    "text": _text_documents,
    "stdlib": _stdlib_documents,
    "json": _json_documents,
    "jsonl": _jsonl_documents,
    "parquet": _parquet_documents,
    "hf": _hugging_face_documents,
}


# ---------------------------------------------------------------- opening files


@contextmanager
def _opened(source: Source) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """A file's decompressed bytes, and how many bytes of the file itself have been read."""
    assert source.path is not None
    try:
        with open(source.path, "rb") as raw:
            suffix = source.path.suffix.lower()
            stream: Any = raw
            if suffix == ".gz":
                stream = gzip.GzipFile(fileobj=raw)
            elif suffix == ".zst":
                import pyarrow as arrow

                stream = io.BufferedReader(arrow.CompressedInputStream(raw, "zstd"), 1 << 20)
            yield stream, raw.tell
    except (OSError, EOFError, zlib.error) as error:
        if reason := getattr(error, "strerror", None):  # the system's, not a decompressor's
            raise UserError(f"{source.name}: cannot be read: {reason}") from None
        raise UserError(
            f"{source.name}: truncated or damaged compressed file ({error}); fetch it anew"
        ) from None


# ---------------------------------------------------------------- cutting text into documents


def document_size(rule: str) -> int | None:
    """Bytes after which a document may end, by --split-documents; None for `auto`."""
    if rule == "auto":
        return None
    if rule == "file":
        return sys.maxsize
    size = re.fullmatch(r"([1-9][0-9]{0,11})([kM]?)", rule)
    if not size:
        raise UserError(f"--split-documents {rule[:40]}: not one of auto, file, a size (64k, 1M)")
    return int(size[1]) << {"": 0, "k": 10, "M": 20}[size[2]]


def cut(stream: BinaryIO, size: int) -> Iterator[bytes]:
    """Documents of `size` bytes and up to the next blank line; failing that, up to a line's end
    after twice the size; failing that, up to a character's end after four times the size. Nothing
    is dropped: joined, they are the file."""
    document = bytearray()
    for line in iter(lambda: stream.readline(size), b""):
        document += line
        length = len(document)
        blank, ended = not line.strip(), line.endswith(b"\n")
        if (length >= size and blank and ended) or (length >= 2 * size and ended):
            yield bytes(document)
            document.clear()
        elif length >= 4 * size:
            end = length - 1  # the last character may be incomplete: it goes to the next
            while end > 0 and document[end] & 0xC0 == 0x80:
                end -= 1
            if end:
                yield bytes(document[:end])
                del document[:end]
    yield bytes(document)
