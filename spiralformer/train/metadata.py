"""The `.metadata` of a checkpoint, read without running what it says.

PyTorch writes it as a pickle, and an unpickler calls what a pickle names. Here the names that such
a file needs stand for things that do nothing; the metadata that PyTorch works with is built from
them, checked, and describes tensors only: PyTorch would unpickle any other kind of entry in full.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from spiralformer.errors import UserError, first_line
from spiralformer.files import inside

METADATA = ".metadata"
PLAIN: dict[str, Any] = {  # what a pickle may call besides, and what is called in its place
    "torch.Size": tuple,
    "torch.serialization._get_layout": str,
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": int,
}
KINDS = {
    f"{kind.__module__}.{kind.__qualname__}"
    for kind in (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
        _StorageInfo,
    )
}


class _Fields:
    """Stands for an object of PyTorch's: its state, and nothing that acts."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Inert(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in KINDS:
            return type(name, (_Fields,), {})  # of this reading alone: a pickle may change a class
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if module.startswith("pathlib") and name in ("PosixPath", "WindowsPath"):
            return lambda *parts: None
        if full not in PLAIN:
            raise UserError(f"it names {full}, which no checkpoint of tensors needs")
        return PLAIN[full]


def read_metadata(checkpoint: Path) -> Metadata:
    """Refused, with a UserError, unless it describes tensors in files of the checkpoint."""
    path = inside(checkpoint, METADATA)
    try:
        with open(path, "rb") as file:
            stored = _state(_Inert(file).load(), Metadata)
        entries, stored_at = stored["state_dict_metadata"], stored["storage_data"]
        tensors: dict[str, Any] = {_text(name): _tensor(entry) for name, entry in entries.items()}
        places = dict(_place(checkpoint, index, at) for index, at in stored_at.items())
    except FileNotFoundError:
        raise
    except Exception as error:  # whatever bytes that are no such pickle lead to
        raise UserError(f"{path}: not the metadata of a checkpoint: {first_line(error)}") from None
    return Metadata(tensors, storage_data=places, storage_meta=StorageMeta())


def _tensor(entry: Any) -> TensorStorageMetadata:
    fields = _state(entry, TensorStorageMetadata)
    dtype = _state(fields["properties"], TensorProperties)[0]
    if not isinstance(dtype, torch.dtype):
        raise UserError(f"{dtype!r} is not a type of numbers")
    chunks = [_state(chunk, ChunkStorageMetadata) for chunk in fields["chunks"]]
    return TensorStorageMetadata(
        TensorProperties(dtype=dtype),
        torch.Size(fields["size"]),
        [ChunkStorageMetadata(torch.Size(c["offsets"]), torch.Size(c["sizes"])) for c in chunks],
    )


def _place(checkpoint: Path, index: Any, place: Any) -> tuple[MetadataIndex, _StorageInfo]:
    index, place = _state(index, MetadataIndex), _state(place, _StorageInfo)
    if place.get("transform_descriptors"):
        raise UserError("its tensors are stored in another form")
    file = inside(checkpoint, place["relative_path"])
    if not file.is_file():
        raise UserError(f"{file.name} is no file")
    return (
        MetadataIndex(_text(index["fqn"]), index.get("offset"), index.get("index")),
        _StorageInfo(file.name, int(place["offset"]), int(place["length"])),
    )


def _state(stored: Any, kind: type) -> Any:
    if not isinstance(stored, _Fields) or type(stored).__name__ != kind.__name__:
        raise UserError(f"a {type(stored).__name__} in place of a {kind.__name__}")
    return stored.state


def _text(name: Any) -> str:
    if not isinstance(name, str):
        raise UserError(f"{name!r} in place of a name")
    return name


class TensorReader(FileSystemReader):
    """PyTorch's reader of checkpoints, with that metadata."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_metadata(Path(self.path))
