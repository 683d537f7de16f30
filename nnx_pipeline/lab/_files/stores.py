"""Paths into object stores, `gs://bucket/name` and `s3://bucket/name`, by fsspec.

A store has objects with names and no folders: a folder is there where an object's name begins with
it, and its name cannot be changed. An object appears whole or not at all.
"""

import contextlib
import errno
import fnmatch
import logging
import os
from collections.abc import Generator, Iterator
from pathlib import Path, PosixPath
from typing import Any, NamedTuple

from nnx_pipeline.lab.errors import InputError, Unavailable, optional

SCHEMES = {"gs": "gcsfs", "s3": "s3fs"}  # and the package by which fsspec knows each
# In what libraries say of an account that may not do something, or of none.
_DENIED = ("forbidden", "denied", "credentials", "unauthorized", "invalid_grant", "accesskeyid")


class Stamp(NamedTuple):
    """What changes when an object is written again."""

    size: int
    written: str


class StorePath(PosixPath):
    """A path into a store, with the methods of `Path` that readers and writers of folders call.

    Each raises InputError where the store refuses the account, and Unavailable where it does not
    answer. What would take it for a file of this machine, such as `open(path)`, is a TypeError.
    """

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is not a file of this machine")

    @property
    def scheme(self) -> str:
        return self.parts[0].removesuffix(":")

    @property
    def bucket(self) -> str:
        return self.parts[1]

    @property
    def key(self) -> str:
        """The name within the bucket; empty for the bucket itself."""
        return "/".join(self.parts[2:])

    @property
    def name_in_fsspec(self) -> str:
        return "/".join(self.parts[1:])

    @property
    def parent(self) -> "StorePath":
        """Of a bucket itself, as of the root of a file system."""
        return super().parent if self.key else self

    def absolute(self) -> "StorePath":
        return self

    def resolve(self, strict: bool = False) -> "StorePath":
        return self

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        return self._kind() is not None

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._kind() == "directory"

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._kind() == "file"

    def is_symlink(self) -> bool:
        return False

    def iterdir(self) -> "Generator[StorePath, None, None]":
        with contextlib.suppress(FileNotFoundError), self._asking() as store:
            for entry in store.ls(self.name_in_fsspec, detail=False):
                name = entry.rstrip("/").rpartition("/")[2]
                if entry.rstrip("/") == f"{self.name_in_fsspec}/{name}":  # else it is this itself
                    yield self / name

    def glob(self, pattern: str, **options: object) -> "Generator[StorePath, None, None]":
        """Of `**`, what is below; of other patterns, one part of which has no `**`, as a path."""
        first, _, rest = pattern.partition("/")
        if first == "**":
            yield from self.below()
            return
        for child in self.iterdir():
            if fnmatch.fnmatchcase(child.name, first):
                yield from child.glob(rest) if rest else (child,)

    def below(self) -> "dict[StorePath, Stamp]":
        """Every object whose name begins with this folder, by one listing."""
        with contextlib.suppress(FileNotFoundError), self._asking() as store:
            found = store.find(self.name_in_fsspec, detail=True)
            bucket = type(self)(f"{self.scheme}:/")
            begin = f"{self.name_in_fsspec}/"  # `1` is no folder of what is in `10`
            inside = {name: entry for name, entry in found.items() if name.startswith(begin)}
            return {bucket / name: _stamp(entry) for name, entry in inside.items()}
        return {}

    def stamp(self) -> Stamp | None:
        """None where there is no object."""
        with contextlib.suppress(FileNotFoundError), self._asking() as store:
            return _stamp(store.info(self.name_in_fsspec))
        return None

    def read_bytes(self) -> bytes:
        return self.read_part(None, None)

    def read_part(self, begin: int | None, end: int | None) -> bytes:
        """The bytes from `begin` to `end`, without that at `end`."""
        with self._asking() as store:
            content: bytes = store.cat_file(self.name_in_fsspec, start=begin, end=end)
            return content

    def read_text(
        self, encoding: str | None = None, errors: str | None = None, newline: str | None = None
    ) -> str:
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def write_bytes(self, data: Any) -> int:
        with self._asking() as store:
            store.pipe_file(self.name_in_fsspec, bytes(data))
        return len(data)

    def write_text(
        self,
        data: str,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> int:
        return self.write_bytes(data.encode(encoding or "utf-8"))

    def upload(self, file: Path) -> None:
        """Writes the content of a file of this machine, piece by piece."""
        with self._asking() as store:
            store.put_file(str(file), self.name_in_fsspec)

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            with self._asking() as store:
                store.rm_file(self.name_in_fsspec)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def require_bucket(self) -> None:
        """Raises InputError where there is no such bucket."""
        try:
            with self._asking() as store:
                store.ls(self.bucket, detail=False)
        except FileNotFoundError as error:
            raise InputError(
                f"{self}: there is no bucket {self.scheme}://{self.bucket}; make it, or give the "
                "name of another one"
            ) from error

    def kvstore(self, inside: str = "") -> dict[str, Any]:
        """TensorStore's key-value store of the objects in this folder that begin with `inside`."""
        path = f"{self.key}/{inside}" if self.key else inside
        if self.scheme == "gs":
            if host := os.environ.get("STORAGE_EMULATOR_HOST"):  # of which gcsfs alone knows
                os.environ.setdefault("TENSORSTORE_GCS_HTTP_URL", host)
            return {"driver": "gcs", "bucket": self.bucket, "path": path}
        names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
        endpoint = next(filter(None, map(os.environ.get, names)), None)
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        told = {"endpoint": endpoint, "aws_region": region}
        store = {key: value for key, value in told.items() if value}
        if "AWS_ACCESS_KEY_ID" in os.environ:  # else it complains of files that are not there
            store["aws_credentials"] = {"type": "environment"}  # type: ignore[assignment]
        return {"driver": "s3", "bucket": self.bucket, "path": path, **store}

    def _kind(self) -> str | None:
        with contextlib.suppress(FileNotFoundError), self._asking() as store:
            kind: str = store.info(self.name_in_fsspec)["type"]
            return kind
        return None

    @contextlib.contextmanager
    def _asking(self) -> Iterator[Any]:
        """The file system of fsspec; what it raises becomes one of three errors."""
        store = _file_system(self.scheme, str(self))
        try:
            yield store
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self)) from error
        except Exception as error:
            raise refused(str(self), f"{type(error).__name__}: {error}") from error


def refused(what: str, said: str) -> Exception:
    """The error for what a store, or the way to it, says of a request."""
    words = " ".join(said.split())[:300]
    if _is_denial(words):
        return InputError(
            f"{what} may not be read or written by this account ({words}); log in with one that "
            "may, or ask the owner of the bucket"
        )
    return Unavailable(
        f"{what} cannot be reached ({words}); see whether the network and the endpoint of the "
        "store are there, and run this again"
    )


def _is_denial(words: str) -> bool:
    return any(word in words.lower().replace(" ", "") for word in _DENIED)


def _stamp(entry: dict[str, Any]) -> Stamp:
    """What listings and questions after one object say alike."""
    written = [entry.get(key) for key in ("generation", "ETag", "LastModified", "updated")]
    return Stamp(int(entry["size"] or 0), " ".join(str(part) for part in written if part))


def _file_system(scheme: str, user: str) -> Any:
    """fsspec itself keeps one of each."""
    optional(SCHEMES[scheme], "stores", user)
    import fsspec

    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it shows what is raised too
    return fsspec.filesystem(scheme, use_listings_cache=False)  # others write there too
