"""A small server that speaks the Hub's protocol, for the Hub's own client."""

import base64
import hashlib
import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import yaml

NAME = "owner/tiny"
MAIN, OLD = "a" * 40, "b" * 40


class Repository(NamedTuple):
    revisions: dict[str, str]
    files: dict[str, dict[str, bytes]]  # by commit, then by name
    private: bool = False


class RefusalError(Exception):
    """more: of the answer, which is JSON if there is a message."""

    def __init__(self, status: int, code: str = "", message: str = "", **more: Any) -> None:
        self.status, self.code, self.message, self.more = status, code, message, more


class FakeHub(ThreadingHTTPServer):
    """Serves `repositories`, keeps `requests`, and answers every request with `refusal` if it is set.

    stored: uploaded large files by sha256. uploads: their hashes, in order. on_upload: called before each is stored.
    writers: tokens that may write.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, Repository] = {}
        self.requests: list[tuple[str, str]] = []
        self.refusal: RefusalError | None = None
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.stored: dict[str, bytes] = {}
        self.uploads: list[str] = []
        self.on_upload: Callable[[], None] = lambda: None
        self.writers: set[str] = set()

    def files_of(self, method: str) -> set[str]:
        """The files that were requested by GET or HEAD."""
        return {path.rsplit("/", 1)[1] for verb, path in self.requests if verb == method and "/resolve/" in path}

    def newest(self, name: str) -> dict[str, bytes]:
        """The files on the main branch of a repository."""
        repository = self.repositories[name]
        return repository.files[repository.revisions["main"]]

    def cut(self) -> None:
        import huggingface_hub

        self.shutdown()
        self.server_close()
        huggingface_hub.close_session()  # a connection that is open would still be served


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def is_large(path: str) -> bool:
    return path.endswith(".safetensors")


def described(path: str, data: bytes) -> dict[str, Any]:
    """A file, as the Hub lists it."""
    large = {"oid": sha256(data), "size": len(data), "pointerSize": 130}
    oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    more = {"lfs": large} if is_large(path) else {}
    return {"type": "file", "path": path, "size": len(data), "oid": oid, **more}


class Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None: ...

    def do_HEAD(self) -> None:
        self.answer(self.read)

    def do_GET(self) -> None:
        self.answer(self.read)

    def do_POST(self) -> None:
        self.answer(self.write)

    def do_PUT(self) -> None:
        self.answer(self.upload)

    def answer(self, make: Callable[[str, bytes, dict[str, str]], Any]) -> None:
        """Send what make(path, body of the request, headers to fill) returns: bytes, or a value as JSON."""
        path = self.path.partition("?")[0].strip("/")
        self.server.requests.append((self.command, path))
        sent, status, headers = self.rfile.read(int(self.headers["Content-Length"] or 0)), 200, {}
        try:
            if self.server.refusal:
                raise self.server.refusal
            value = make(path, sent, headers)
            body = value if isinstance(value, bytes) else json.dumps(value).encode()
        except RefusalError as refusal:
            status, headers = refusal.status, {"X-Error-Code": refusal.code} if refusal.code else {}
            body = json.dumps({"error": refusal.message, **refusal.more}).encode() if refusal.message else b""
        self.send_response(status)
        for key, text in {"Content-Type": "application/json", **headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def read(self, path: str, sent: bytes, headers: dict[str, str]) -> Any:
        if path.startswith("api/"):
            if not path.startswith(("api/models/", "api/datasets/")):  # the client's own questions
                raise RefusalError(404, message="Not found.")
            parts = path.split("/")[2:6]
            owner, name, kind, revision = (*parts, *("revision", "main")[len(parts) - 2 :])
            commit, files = self.find(f"{owner}/{name}", revision)
            if kind == "tree":
                return [described(path, data) for path, data in files.items()]
            private = self.server.repositories[f"{owner}/{name}"].private
            siblings = [{"rfilename": file} for file in files]
            return {"id": f"{owner}/{name}", "sha": commit, "siblings": siblings, "private": private}
        if "/resolve/" not in path:
            raise RefusalError(404)
        owner, name, _, revision, file = path.removeprefix("datasets/").split("/", 4)
        commit, files = self.find(f"{owner}/{name}", revision)
        if file not in files:
            raise RefusalError(404, "EntryNotFound")
        headers |= {"X-Repo-Commit": commit, "ETag": f'"{sha256(files[file])}"'}
        return files[file]

    def find(self, name: str, revision: str) -> tuple[str, dict[str, bytes]]:
        if name not in self.server.repositories:
            raise RefusalError(404, "RepoNotFound")
        repository = self.server.repositories[name]
        commit = repository.revisions.get(revision, revision)
        if commit not in repository.files:
            raise RefusalError(404, "RevisionNotFound")
        return commit, repository.files[commit]

    def upload(self, path: str, sent: bytes, headers: dict[str, str]) -> bytes:
        self.server.on_upload()
        assert sha256(sent) == path.rsplit("/", 1)[1]
        self.server.uploads.append(sha256(sent))
        self.server.stored[sha256(sent)] = sent
        return b""

    def write(self, path: str, sent: bytes, headers: dict[str, str]) -> Any:
        if path == "api/validate-yaml":
            metadata = yaml.safe_load(json.loads(sent)["content"].split("---")[1])
            if not isinstance(metadata.get("license", ""), str):
                raise RefusalError(400, message="invalid", errors=[{"message": "license must be a string"}])
            return {}
        token = (self.headers["Authorization"] or "").removeprefix("Bearer ")
        if token not in self.server.writers:
            raise RefusalError(403, message="This token may not write to this repository.")
        if path == "api/repos/create":
            given = json.loads(sent)
            name = f"{given['organization']}/{given['name']}"
            if name in self.server.repositories:
                raise RefusalError(409, message="it exists", url=f"{self.server.url}/{name}")
            private = given.get("visibility") == "private" or given.get("private", False)
            self.server.repositories[name] = Repository(
                {"main": "0" * 40}, {"0" * 40: {".gitattributes": b""}}, private
            )
            return {"url": f"{self.server.url}/{name}"}
        if path.endswith(".git/info/lfs/objects/batch"):
            return {"objects": [self.place(large) for large in json.loads(sent)["objects"]]}
        _, _, owner, name, kind, *_ = path.split("/")
        return getattr(self, kind.replace("-", "_"))(f"{owner}/{name}", sent)

    def place(self, large: dict[str, Any]) -> dict[str, Any]:
        """Answer with the address to upload a large file to, unless it is stored."""
        upload = {"upload": {"href": f"{self.server.url}/upload/{large['oid']}"}}
        return large if large["oid"] in self.server.stored else {**large, "actions": upload}

    def preupload(self, name: str, sent: bytes) -> dict[str, Any]:
        listed = []
        for path in (file["path"] for file in json.loads(sent)["files"]):
            data = self.server.newest(name).get(path)
            file = described(path, data or b"")
            known = {} if data is None else {"oid": file.get("lfs", file)["oid"]}
            mode = "lfs" if is_large(path) else "regular"
            listed.append({"path": path, "uploadMode": mode, "shouldIgnore": False, **known})
        return {"files": listed}

    def commit(self, name: str, sent: bytes) -> dict[str, Any]:
        files = dict(self.server.newest(name))
        for line in sent.decode().splitlines():
            kind, value = json.loads(line).values()
            if kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                files[value["path"]] = self.server.stored[value["oid"]]
        repository = self.server.repositories[name]
        commit = f"{len(repository.files):040x}"
        repository.files[commit] = files
        repository.revisions["main"] = commit
        return {"commitUrl": f"{self.server.url}/{name}/commit/{commit}", "commitOid": commit}


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
