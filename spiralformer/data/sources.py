"""Where text comes from: files and folders, Hugging Face datasets, the standard library. All of it
becomes one sequence of documents in an order that does not depend on the machine."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import re
import sysconfig
import tokenize
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from spiralformer.errors import UserError

KINDS = {".txt": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
COMPRESSIONS = (".gz", ".zst")

WHOLE_FILE_LIMIT = 1 << 20  # a .txt file up to this size is one document under the `auto` rule
AUTO_DOCUMENT_SIZE = 1 << 16  # a larger one is cut into documents of about this size
LONGEST_LINE = 1 << 24  # longer lines of a text file are read in pieces


# ---------------------------------------------------------------- which documents there are


@dataclass(frozen=True)
class Source:
    """One file, Hugging Face dataset or embedded corpus."""

    kind: str  # text, jsonl, parquet, hf or stdlib
    name: str  # as shown to the user
    path: Path | None = None
    size: int | None = None  # bytes to read, where known: for the time left
    identity: dict[str, Any] = field(default_factory=dict)
    """What tells this source from an edited one. The folder that it lies in is not part of it."""


def find_sources(arguments: list[str]) -> list[Source]:
    """The sources that command-line arguments name: files, folders, `hf:NAME`, `stdlib`."""
    sources: list[Source] = []
    for argument in arguments:
        if argument == "stdlib":
            sources.append(_stdlib_source())
        elif argument.startswith("hf:"):
            sources.append(_hugging_face_source(argument))
        elif Path(argument).is_dir():
            sources.extend(_folder_sources(Path(argument)))
        else:
            sources.append(_file_source(Path(argument), Path(argument).name))
    if not sources:
        raise UserError("no source given; name files, folders, hf:NAME or stdlib")
    return sources


def _folder_sources(folder: Path) -> list[Source]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and _kind(path))
    if not files:
        known = ", ".join(KINDS)
        raise UserError(f"{folder}: no {known} file in this folder (or .gz, .zst of one)")
    return [_file_source(path, path.relative_to(folder).as_posix()) for path in files]


def _file_source(path: Path, name: str) -> Source:
    try:
        status = path.stat()
        with open(path, "rb"):
            pass
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file or folder (other sources: hf:NAME, stdlib)"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    identity = {"file": name, "size": status.st_size, "mtime_ns": status.st_mtime_ns}
    # A file that is named outright is text unless its name says otherwise: enwik8, book.md
    return Source(_kind(path) or "text", str(path), path, status.st_size, identity)


def _kind(path: Path) -> str | None:
    """What a file's name says it holds; `x.gz` with no inner suffix is text."""
    suffix = path.suffix.lower()
    if suffix in COMPRESSIONS:
        inner = Path(path.stem).suffix.lower()
        return KINDS.get(inner, None if inner else "text")
    return KINDS.get(suffix)


def _hugging_face_source(argument: str) -> Source:
    match = re.fullmatch(r"hf:([^:,]+)(?:,([^:,]+))?(?::([^:,]+))?", argument)
    if not match:
        raise UserError(f"{argument}: not of the form hf:NAME[,CONFIG][:SPLIT]")
    name, config, split = match.groups()
    identity = {"dataset": name, "config": config, "split": split or "train"}
    return Source("hf", argument, identity=identity)


# Tests, and packages of others that are only bundled or installed there.
_NOT_STDLIB = {"test", "tests", "idle_test", "_bundled", "site-packages", "dist-packages"}


def stdlib_files() -> list[Path]:
    """The sources of the running Python's standard library, ordered by name."""
    files = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = [name for name in folders if name not in _NOT_STDLIB]  # not even looked into
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    made_by_the_build = "_sysconfigdata"
    kept = [path for path in files if not path.name.startswith(made_by_the_build)]
    return sorted(kept, key=lambda path: path.as_posix())


def _stdlib_source() -> Source:
    files = stdlib_files()
    if not files:
        raise UserError(f"stdlib: no Python sources in {sysconfig.get_path('stdlib')}")
    digest, size = hashlib.sha256(), 0
    for path in files:
        data = path.read_bytes()
        digest.update(data)
        size += len(data)
    identity = {"stdlib": platform.python_version(), "sha256": digest.hexdigest()}
    return Source("stdlib", "stdlib", size=size, identity=identity)


# ---------------------------------------------------------------- reading them


class Document(NamedTuple):
    text: str | None  # None: unreadable, and `skip_bad` was asked for
    consumed: int  # bytes of the source read so far, for the time left


@dataclass(frozen=True)
class ReadOptions:
    text_field: str = "text"
    split_documents: str = "auto"
    skip_bad: bool = False
    notice: Callable[[str], None] = lambda message: None  # told what the `auto` rule did


def read_documents(source: Source, options: ReadOptions) -> Iterator[Document]:
    """The documents of one source, in order. Bad input raises `UserError` with its place."""
    readers = {
        "text": _read_text,
        "jsonl": _read_jsonl,
        "parquet": _read_parquet,
        "hf": _read_hugging_face,
        "stdlib": _read_stdlib,
    }
    yield from readers[source.kind](source, options)


@contextmanager
def _opened(source: Source) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """A file's decompressed bytes, and how many bytes of the file itself have been read."""
    assert source.path is not None
    try:
        with open(source.path, "rb") as raw:
            suffix = source.path.suffix.lower()
            if suffix == ".gz":
                yield cast(BinaryIO, gzip.GzipFile(fileobj=raw)), raw.tell
            elif suffix == ".zst":
                yield cast(BinaryIO, io.BufferedReader(_ZstdReader(raw), 1 << 20)), raw.tell
            else:
                yield raw, raw.tell
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(
            f"{source.name}: truncated or damaged compressed file ({error}); fetch it anew"
        ) from None
    except OSError as error:
        raise UserError(f"{source.name}: cannot be read: {error.strerror or error}") from None


class _ZstdReader(io.RawIOBase):
    """Zstandard frames, one after another. The package's own reader takes a file that ends in the
    middle of a frame for a complete one; this one raises `EOFError`."""

    def __init__(self, raw: BinaryIO):
        self.zstandard = _optional("zstandard", "reading .zst files")
        self.raw, self.ready, self.unused = raw, b"", b""
        self.frame: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.ready:
            data = self.unused or self.raw.read(1 << 17)
            if not data:
                if self.frame is not None:
                    raise EOFError("it ends inside a zstd frame")
                return 0
            if self.frame is None:  # large windows: what `zstd --long=31` writes
                decompressor = self.zstandard.ZstdDecompressor(max_window_size=1 << 31)
                self.frame = decompressor.decompressobj()
            try:
                self.ready = self.frame.decompress(data)
            except self.zstandard.ZstdError as error:
                raise EOFError(str(error)) from None
            self.unused = self.frame.unused_data
            if self.frame.eof:
                self.frame = None
        count = min(len(buffer), len(self.ready))
        buffer[:count], self.ready = self.ready[:count], self.ready[count:]
        return count


def _optional(module: str, purpose: str) -> Any:
    try:
        return __import__(module, fromlist=["_"])
    except ImportError:
        package = module.partition(".")[0]
        raise UserError(
            f"{purpose} needs the package {package}: pip install 'spiralformer[data]'"
        ) from None


def _read_text(source: Source, options: ReadOptions) -> Iterator[Document]:
    cut = parse_cut(options.split_documents)
    if cut is None:  # auto
        with _opened(source) as (stream, _):
            large = len(stream.read(WHOLE_FILE_LIMIT + 1)) > WHOLE_FILE_LIMIT
        cut = cut_by_size(AUTO_DOCUMENT_SIZE) if large else cut_nowhere
        if large:
            options.notice(
                f"{source.name}: over {WHOLE_FILE_LIMIT >> 20} MiB of text, so it is cut at blank "
                f"lines into documents of about {AUTO_DOCUMENT_SIZE >> 10} KiB (--split-documents)"
            )
    offset = 0
    with _opened(source) as (stream, consumed):
        for data in cut(stream):
            text: str | None = None
            try:
                text = data.decode()
            except UnicodeDecodeError as error:
                if not options.skip_bad:
                    raise UserError(
                        f"{source.name}: not UTF-8 at byte {offset + error.start}; convert it, or "
                        "leave such documents out with --skip-bad"
                    ) from None
            offset += len(data)
            yield Document(text, consumed())


def _read_jsonl(source: Source, options: ReadOptions) -> Iterator[Document]:
    with _opened(source) as (stream, consumed):
        for number, line in enumerate(stream, 1):
            if line.strip():
                text = _checked(_json_text, line, f"{source.name}:{number}", options)
                yield Document(text, consumed())


def _checked(
    text_of: Callable[[Any, str], str], record: Any, place: str, options: ReadOptions
) -> str | None:
    """The text of a record; what is wrong with it is an error at `place`, or skipped."""
    try:
        return text_of(record, options.text_field)
    except ValueError as error:
        if options.skip_bad:
            return None
        raise UserError(f"{place}: {error}; mend it, or leave such out with --skip-bad") from None


def _json_text(line: bytes, field: str) -> str:
    try:
        return _record_text(json.loads(line), field)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error.msg} at column {error.colno})") from None


def _record_text(record: Any, field: str) -> str:
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    if field not in record:
        known = ", ".join(record) or "none"
        raise ValueError(f"no field {field!r} (fields here: {known}; --text-field names another)")
    text = record[field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise ValueError(f"field {field!r} is {type(text).__name__}, not text")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"field {field!r} has half a surrogate pair") from None
    return text


def _read_parquet(source: Source, options: ReadOptions) -> Iterator[Document]:
    parquet = _optional("pyarrow.parquet", "reading .parquet files")
    arrow = _optional("pyarrow", "reading .parquet files")
    row = 0
    try:
        with _opened(source) as (stream, _):
            file = parquet.ParquetFile(stream)
            if options.text_field not in file.schema_arrow.names:
                raise UserError(
                    f"{source.name}: no column {options.text_field!r} (columns here: "
                    f"{', '.join(file.schema_arrow.names)}; --text-field names another)"
                )
            for batch in file.iter_batches(1024, columns=[options.text_field]):
                for text in batch.column(0).to_pylist():
                    record, place = {options.text_field: text}, f"{source.name}, row {row}"
                    row += 1
                    consumed = (source.size or 0) * row // file.metadata.num_rows
                    yield Document(_checked(_record_text, record, place, options), consumed)
    except arrow.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{source.name}: not a complete Parquet file ({reason})") from None


def _read_hugging_face(source: Source, options: ReadOptions) -> Iterator[Document]:
    datasets = _optional("datasets", "reading Hugging Face datasets")
    wanted = source.identity
    try:
        rows = datasets.load_dataset(
            wanted["dataset"], wanted["config"], split=wanted["split"], streaming=True
        )
        for number, row in enumerate(rows):
            place = f"{source.name}, row {number}"
            yield Document(_checked(_record_text, row, place, options), 0)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{source.name}: Hugging Face datasets cannot read it: {reason}\n"
            "Check the name (hf:NAME[,CONFIG][:SPLIT]) and the network."
        ) from None


def _read_stdlib(source: Source, options: ReadOptions) -> Iterator[Document]:
    consumed = 0
    for path in stdlib_files():
        data = path.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        consumed += len(data)
        yield Document(data.decode(encoding), consumed)


# ---------------------------------------------------------------- cutting text into documents

Cut = Callable[[BinaryIO], Iterator[bytes]]
"""Cuts a file into documents. Nothing is dropped: joined, they are the file."""


def parse_cut(rule: str) -> Cut | None:
    """`file`, `blank`, a size such as 64k or 1M, `re:PATTERN`; None for `auto`."""
    if rule == "auto":
        return None
    if rule == "file":
        return cut_nowhere
    if rule == "blank":
        return cut_at_blank_lines
    if rule.startswith("re:"):
        try:
            return cut_after(re.compile(rule[3:].encode()))
        except re.error as error:
            raise UserError(f"--split-documents {rule}: bad pattern: {error}") from None
    size = re.fullmatch(r"([1-9]\d*)([kM]?)", rule)
    if not size:
        raise UserError(
            f"--split-documents {rule}: not one of auto, file, blank, a size (64k, 1M), re:PATTERN"
        )
    return cut_by_size(int(size[1]) << {"": 0, "k": 10, "M": 20}[size[2]])


def cut_nowhere(stream: BinaryIO) -> Iterator[bytes]:
    yield stream.read()


def cut_at_blank_lines(stream: BinaryIO) -> Iterator[bytes]:
    """Each paragraph, with the blank lines that follow it, is a document."""
    document, after_blank = bytearray(), False
    for line in _lines(stream, LONGEST_LINE):
        blank = not line.strip()
        if after_blank and not blank and document.strip():
            yield bytes(document)
            document.clear()
        document += line
        after_blank = blank
    yield bytes(document)


def cut_after(pattern: re.Pattern[bytes]) -> Cut:
    """A document ends with each line in which the pattern is found."""

    def cut(stream: BinaryIO) -> Iterator[bytes]:
        document = bytearray()
        for line in _lines(stream, LONGEST_LINE):
            document += line
            if pattern.search(line):
                yield bytes(document)
                document.clear()
        yield bytes(document)

    return cut


def cut_by_size(size: int) -> Cut:
    """Documents of `size` bytes and up to the next blank line; failing that, up to a line's end
    after twice the size; failing that, up to a character's end after four times the size."""

    def cut(stream: BinaryIO) -> Iterator[bytes]:
        document = bytearray()
        for line in _lines(stream, size):
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

    return cut


def _lines(stream: BinaryIO, longest: int) -> Iterator[bytes]:
    return iter(lambda: stream.readline(longest), b"")
