"""A small server that speaks the Hub's protocol, for the Hub's own client."""

import base64
import hashlib
import json
import re
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import yaml

NAME = "owner/tiny"
MAIN, OLD = "a" * 40, "b" * 40
RELATIONS = (None, "finetune", "adapter", "merge", "quantized")


class Repository(NamedTuple):
    revisions: dict[str, str]
    files: dict[str, dict[str, bytes]]  # by commit, then by name
    private: bool = False


class RefusalError(Exception):
    def __init__(self, status: int, code: str | None = None, message: str = "") -> None:
        super().__init__(status, code)
        self.status, self.code, self.message = status, code, message


class FakeHub(ThreadingHTTPServer):
    """Serves `repositories`; `requests` holds what was asked, `refusal` what everything is answered with.

    stored: uploaded large files by sha256. uploads: their hashes, in order. on_upload: called before each is stored.
    copies: whether files are copied from one repository to another. writers: tokens that may write.
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
        self.copies = True
        self.writers: set[str] = set()

    def asked_for(self, method: str) -> set[str]:
        """The files that were asked for by GET or HEAD."""
        return {path.rsplit("/", 1)[1] for verb, path in self.requests if verb == method and "/resolve/" in path}

    def newest(self, name: str) -> dict[str, bytes]:
        """The files on the main branch of a repository."""
        repository = self.repositories[name]
        return repository.files[repository.revisions["main"]]


def git_name(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def is_large(path: str) -> bool:
    return path.endswith(".safetensors")


def described(path: str, data: bytes) -> dict[str, Any]:
    """A file, as the Hub lists it."""
    large = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    own = {"lfs": large, "xetHash": hashlib.sha256(b"xet" + data).hexdigest()} if is_large(path) else {}
    return {"type": "file", "path": path, "size": len(data), "oid": git_name(data), **own}


class Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        self.server.requests.append((self.command, path))
        try:
            if path.startswith(("api/models/", "api/datasets/")):
                body, headers = self.api(*path.split("/", 6)[2:])
            elif "/resolve/" not in path:
                raise RefusalError(404)
            else:
                body, headers = self.file(*path.removeprefix("datasets/").split("/", 4))
            self.answer(200, body, headers)
        except RefusalError as refusal:
            self.refuse(refusal)

    def do_POST(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        self.server.requests.append(("POST", path))
        sent = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            self.answer(200, json.dumps(self.posted(path, sent)).encode(), {"Content-Type": "application/json"})
        except RefusalError as refusal:
            self.refuse(refusal)

    def do_PUT(self) -> None:
        name = self.path.rsplit("/", 1)[1]
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.on_upload()
        assert hashlib.sha256(data).hexdigest() == name
        self.server.uploads.append(name)
        self.server.stored[name] = data
        self.answer(200, b"", {})

    def refuse(self, refusal: RefusalError) -> None:
        codes = {"X-Error-Code": refusal.code} if refusal.code else {}
        body = json.dumps({"error": refusal.message, "errors": [{"message": refusal.message}]}).encode()
        self.answer(refusal.status, body if refusal.message else b"", codes)

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def found(self, name: str, revision: str) -> tuple[str, dict[str, bytes]]:
        if self.server.refusal:
            raise self.server.refusal
        if name not in self.server.repositories:
            raise RefusalError(404, "RepoNotFound")
        repository = self.server.repositories[name]
        commit = repository.revisions.get(revision, revision)
        if commit not in repository.files:
            raise RefusalError(404, "RevisionNotFound")
        return commit, repository.files[commit]

    def api(self, owner: str, name: str, kind: str = "revision", revision: str = "main", *_) -> tuple[bytes, dict]:
        commit, files = self.found(f"{owner}/{name}", revision)
        listing = [described(path, data) for path, data in files.items()]
        private = self.server.repositories[f"{owner}/{name}"].private
        about = {"id": f"{owner}/{name}", "sha": commit, "siblings": [], "private": private}
        answer = listing if kind == "tree" else about
        return json.dumps(answer).encode(), {"Content-Type": "application/json"}

    def file(self, owner: str, name: str, resolve: str, revision: str, path: str) -> tuple[bytes, dict]:
        commit, files = self.found(f"{owner}/{name}", revision)
        if path not in files:
            raise RefusalError(404, "EntryNotFound")
        return files[path], {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(files[path]).hexdigest()}"'}

    def posted(self, path: str, sent: bytes) -> Any:
        if path == "api/validate-yaml":
            return check_metadata(json.loads(sent)["content"])
        token = (self.headers["Authorization"] or "").removeprefix("Bearer ")
        if token not in self.server.writers:
            raise RefusalError(403, message=f"{token} may not write to this repository.")
        if path == "api/repos/create":
            return self.create(json.loads(sent))
        if path.endswith(".git/info/lfs/objects/batch"):
            return {"objects": [self.wanted(one) for one in json.loads(sent)["objects"]]}
        _, _, owner, name, kind, *_ = path.split("/")
        return getattr(self, kind.replace("-", "_"))(f"{owner}/{name}", sent)

    def create(self, asked: dict[str, Any]) -> dict[str, str]:
        name, private = f"{asked['organization']}/{asked['name']}", asked.get("visibility") == "private"
        private = private or asked.get("private", False)
        self.server.repositories[name] = Repository({"main": "0" * 40}, {"0" * 40: {".gitattributes": b""}}, private)
        return {"url": f"{self.server.url}/{name}"}

    def wanted(self, large: dict[str, Any]) -> dict[str, Any]:
        if large["oid"] in self.server.stored:
            return large
        return {**large, "actions": {"upload": {"href": f"{self.server.url}/upload/{large['oid']}"}}}

    def paths_info(self, name: str, sent: bytes) -> list[dict[str, Any]]:
        _, files = self.found(name, self.path.rsplit("/", 1)[1])
        return [described(path, files[path]) for path in parse_qs(sent.decode())["paths"] if path in files]

    def preupload(self, name: str, sent: bytes) -> dict[str, Any]:
        files = self.server.newest(name)
        asked = [one["path"] for one in json.loads(sent)["files"]]
        modes = {path: "lfs" if is_large(path) else "regular" for path in asked}
        return {
            "files": [
                {"path": path, "uploadMode": mode, "shouldIgnore": False}
                | ({"oid": git_name(files[path])} if path in files else {})
                for path, mode in modes.items()
            ]
        }

    def lfs_files(self, name: str, sent: bytes) -> dict[str, Any]:
        """Copy large files of this repository to another one."""
        wanted = [one["sha256"] for one in json.loads(sent)["files"]]
        if not self.server.copies:
            return {"failed": [{"sha256": one, "error": "different region"} for one in wanted]}
        found = {hashlib.sha256(data).hexdigest(): data for data in self.server.newest(name).values()}
        self.server.stored |= {one: found[one] for one in wanted}
        return {"failed": []}

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


def check_metadata(content: str) -> dict[str, Any]:
    """Check the metadata that ropecli writes as the Hub does."""
    found = re.match(r"---\n(.*?)\n---\n", content, re.DOTALL)
    metadata = yaml.safe_load(found[1]) if found else {}
    faults = [
        *([] if metadata.get("base_model_relation") in RELATIONS else ["base_model_relation is unknown"]),
        *([] if isinstance(metadata.get("license", ""), str) else ["license must be a string"]),
        *([] if all(isinstance(tag, str) for tag in metadata.get("tags", [])) else ["tags must be strings"]),
    ]
    if faults:
        raise RefusalError(400, message="; ".join(faults))
    return {}


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def cut(server: FakeHub) -> None:
    import huggingface_hub

    server.shutdown()
    server.server_close()
    huggingface_hub.close_session()  # a connection that is open would still be served


def offline(monkeypatch, value: bool = True) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", value)
