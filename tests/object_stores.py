"""Object stores on 127.0.0.1: moto's server for `s3://`, and the least of Google's for `gs://`.

The servers of PyPI for Google's protocol ignore the preconditions of a write, on which databases of
TensorStore depend. So the methods that TensorStore and gcsfs call are here: objects with
generations, parts of them, writes in one piece or in several, and listings.
"""

import contextlib
import json
import re
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

BUCKET = "bucket"
# Where clients find the server of each scheme, and whom they say they are.
ENDPOINTS = {
    "gs": ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"),
    "s3": ("AWS_ENDPOINT_URL",),
}
ENVIRONMENT = {
    "gs": {
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        "GCE_METADATA_ROOT": "127.0.0.1:1",
        "GCE_METADATA_HOST": "127.0.0.1:1",
    },
    "s3": {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "x", "AWS_REGION": "us-east-1"},
}


class Stored(NamedTuple):
    """An object: its bytes, and the number of its writing."""

    content: bytes
    generation: int


@dataclass
class Faults:
    """`answer` may answer a request in the place of a server, with a status."""

    answer: Callable[[str, str], int | None] = lambda method, path: None


@dataclass
class Google:
    """The buckets of a server."""

    buckets: dict[str, dict[str, Stored]] = field(default_factory=lambda: {BUCKET: {}})
    lock: threading.RLock = field(default_factory=threading.RLock)
    uploads: dict[str, tuple[str, str, bytes]] = field(default_factory=dict)
    count: int = 0

    def put(self, bucket: str, name: str, content: bytes) -> Stored:
        with self.lock:
            self.count += 1
            stored = Stored(content, time.time_ns() + self.count)
            self.buckets[bucket][name] = stored
        return stored


def described(bucket: str, name: str, stored: Stored) -> dict[str, str]:
    """What the protocol says of an object."""
    return {
        "kind": "storage#object",
        "bucket": bucket,
        "name": name,
        "size": str(len(stored.content)),
        "generation": str(stored.generation),
        "etag": str(stored.generation),
        "updated": "2026-01-01T00:00:00.000Z",
        "timeCreated": "2026-01-01T00:00:00.000Z",
    }


class Handler(BaseHTTPRequestHandler):
    """Answers requests to the `google` of its server."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *words: object) -> None: ...

    def reply(self, status: int, body: object = b"", **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if status != 204:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if status != 304:
            self.wfile.write(content)

    def handle_any(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        self.query = dict(urllib.parse.parse_qsl(url.query))
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.google: Google = self.server.google  # type: ignore[attr-defined]
        faults: Faults = self.server.faults  # type: ignore[attr-defined]
        if status := faults.answer(self.command, urllib.parse.unquote(self.path)):
            self.reply(status, {"error": {"code": status, "message": "as the test says"}})
            return
        path = re.fullmatch(
            r"(?:/upload|/download)?/storage/v1/b/([^/]+)(?:/o(?:/(.+))?)?", url.path
        )
        bucket = path and urllib.parse.unquote(path[1])
        if bucket not in self.google.buckets:
            self.reply(404, {"error": {"code": 404, "message": "no such bucket"}})
            return
        name = urllib.parse.unquote(path[2]) if path[2] else self.query.get("name")
        with self.google.lock:
            if url.path.startswith("/upload"):
                self.upload(bucket, name)
            elif not path[2]:
                self.list(bucket, whole=url.path.endswith("/o"))
            else:
                self.object(bucket, name)

    do_GET = do_POST = do_PUT = do_DELETE = handle_any

    def holds(self, stored: Stored | None) -> bool:
        """Whether the preconditions of a request hold of an object."""
        is_now = str(stored.generation if stored else 0)
        wanted, unwanted = (self.query.get(f"ifGeneration{kind}") for kind in ("Match", "NotMatch"))
        return wanted in (None, is_now) and unwanted != is_now

    def object(self, bucket: str, name: str) -> None:
        stored = self.google.buckets[bucket].get(name)
        if not self.holds(stored):
            self.reply(
                304 if self.command == "GET" and "ifGenerationNotMatch" in self.query else 412
            )
        elif stored is None:
            self.reply(404, {"error": {"code": 404, "message": "no such object"}})
        elif self.command == "DELETE":
            del self.google.buckets[bucket][name]
            self.reply(204)
        elif self.query.get("alt") == "media":
            self.content(stored)
        else:
            self.reply(200, described(bucket, name, stored))

    def content(self, stored: Stored) -> None:
        size, generation = len(stored.content), str(stored.generation)
        part = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if part is None:
            self.reply(200, stored.content, x_goog_generation=generation)
            return
        first = int(part[1]) if part[1] else size - int(part[2])
        end = min(int(part[2]) + 1, size) if part[1] and part[2] else size
        if first >= size:
            self.reply(416)
            return
        said = f"bytes {first}-{end - 1}/{size}"
        content = stored.content[first:end]
        self.reply(206, content, Content_Range=said, x_goog_generation=generation)

    def list(self, bucket: str, *, whole: bool) -> None:
        if not whole:
            self.reply(200, {"kind": "storage#bucket", "name": bucket})
            return
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter")
        begin, end = self.query.get("startOffset", ""), self.query.get("endOffset")
        items, prefixes = [], set()
        for name, stored in sorted(self.google.buckets[bucket].items()):
            if not name.startswith(prefix) or name < begin or (end and name >= end):
                continue
            inside = name.removeprefix(prefix)
            if delimiter and delimiter in inside:
                prefixes.add(prefix + inside.split(delimiter)[0] + delimiter)
            else:
                items.append(described(bucket, name, stored))
        self.reply(200, {"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)})

    def upload(self, bucket: str, name: str | None) -> None:
        if "upload_id" in self.query:
            self.go_on(self.query["upload_id"])
            return
        kind, content = self.query["uploadType"], self.body
        if kind == "multipart":
            boundary = re.search("boundary=['\"]?([^'\"]+)", self.headers["Content-Type"])[1]
            _, about, content, _ = self.body.split(b"--" + boundary.encode())
            about, content = (
                re.split(b"\r?\n\r?\n", part, maxsplit=1)[1] for part in (about, content)
            )
            content = re.sub(b"\r?\n\\Z", b"", content)
            name = name or json.loads(about)["name"]
        elif kind == "resumable":
            name = name or json.loads(self.body)["name"]
        if not self.holds(self.google.buckets[bucket].get(name)):
            self.reply(412)
        elif kind == "resumable":
            self.google.count += 1
            known = str(self.google.count)
            self.google.uploads[known] = (bucket, name, b"")
            host = f"http://{self.headers['Host']}{self.path}&upload_id={known}"
            self.reply(200, {}, Location=host)
        else:
            self.reply(200, described(bucket, name, self.google.put(bucket, name, content)))

    def go_on(self, known: str) -> None:
        """The next part of an upload, which is an object after the last part alone."""
        bucket, name, before = self.google.uploads[known]
        content = before + self.body
        self.google.uploads[known] = (bucket, name, content)
        if self.headers.get("Content-Range", "*").endswith("*"):
            self.reply(308, Range=f"bytes=0-{len(content) - 1}")
        else:
            self.reply(200, described(bucket, name, self.google.put(bucket, name, content)))


class Server(NamedTuple):
    """A running server: its address, its faults, and the buckets of Google's."""

    url: str
    faults: Faults
    google: Google | None = None

    def reset(self) -> None:
        """Empties the bucket, and answers all."""
        self.faults.answer = lambda method, path: None
        if self.google is not None:
            self.google.buckets = {BUCKET: {}}
            return
        urllib.request.urlopen(f"{self.url}/moto-api/reset", data=b"").close()
        request = urllib.request.Request(f"{self.url}/{BUCKET}", method="PUT")
        request.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=me/x/us-east-1/s3/aws4")
        urllib.request.urlopen(request).close()


class Quiet(ThreadingHTTPServer):
    """Says nothing of clients that were killed."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.google, self.faults = Google(), Faults()

    def handle_error(self, request: object, client_address: object) -> None: ...


@contextlib.contextmanager
def google_server() -> Iterator[Server]:
    server = Quiet()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield Server(f"http://127.0.0.1:{server.server_port}", server.faults, server.google)
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def amazon_server() -> Iterator[Server]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        running, faults = server._server, Faults()
        app = running.app

        def guarded(request: dict[str, str], start: Callable[..., object]) -> Iterable[bytes]:
            if status := faults.answer(request["REQUEST_METHOD"], request["PATH_INFO"]):
                start(f"{status} as the test says", [("Content-Length", "0")])
                return [b""]
            return app(request, start)

        running.app = guarded
        yield Server(f"http://{host}:{port}", faults)
    finally:
        server.stop()


SERVERS = {"gs": google_server, "s3": amazon_server}


def environment(scheme: str, url: str) -> dict[str, str]:
    """The variables by which a process finds a server."""
    return {**dict.fromkeys(ENDPOINTS[scheme], url), **ENVIRONMENT[scheme]}
