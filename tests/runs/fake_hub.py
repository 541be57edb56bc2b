"""A hub on this machine that knows the few calls with which a model is pushed, and remembers what it was told."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_CANARYofTheTestsOfPushing"


@dataclass
class FakeHub:
    """`files` are those of the last commits, by their path in the repository."""

    endpoint: str = ""
    repos: dict[str, bool] = field(default_factory=dict)  # to whether it is private
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)
    role: str = "write"
    broken: bool = False  # what is committed is refused, and what is asked for fails

    def environment(self) -> dict[str, str]:
        plain = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}
        return {"HF_ENDPOINT": self.endpoint, "HF_TOKEN": TOKEN, **plain}

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """The status, and what is sent back as JSON."""
        path = path.partition("?")[0]
        if path == "/api/whoami-v2":
            return 200, {"name": "me", "type": "user", "auth": {"accessToken": {"role": self.role}}, "orgs": []}
        if path == "/api/validate-yaml":  # of the card's front matter
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            told = json.loads(body)
            name = f"{told.get('organization') or 'me'}/{told['name']}"
            is_new = name not in self.repos
            self.repos.setdefault(name, told.get("private") or told.get("visibility") == "private")
            return (200 if is_new else 409), {"url": f"{self.endpoint}/{name}", "error": "there already"}
        if path.endswith("/preupload/main"):
            names = [file["path"] for file in json.loads(body)["files"]]
            mode = {name: "lfs" if name.endswith((".safetensors", ".bin", ".png")) else "regular" for name in names}
            return 200, {"files": [{"path": n, "shouldIgnore": False, "uploadMode": mode[n]} for n in names]}
        if "/resolve/" in path:  # of which it has none
            return (500 if self.broken else 404), {"error": "EntryNotFound"}
        if path.endswith("/info/lfs/objects/batch"):
            every = json.loads(body)["objects"]
            to = lambda oid: {"upload": {"href": f"{self.endpoint}/blob/{oid}"}}  # noqa: E731
            return 200, {"transfer": "basic", "objects": [{**o, "actions": to(o["oid"])} for o in every]}
        if method == "PUT" and path.startswith("/blob/"):
            self.blobs[path.removeprefix("/blob/")] = body
            assert hashlib.sha256(body).hexdigest() == path.removeprefix("/blob/")
            return 200, {}
        if path.endswith("/commit/main"):
            return self._commit(body)
        name = path.removeprefix("/api/models/")
        if name in self.repos:
            return 200, {
                "id": name,
                "modelId": name,
                "private": self.repos[name],
                "sha": "0" * 40,
                "siblings": [],
                "tags": [],
            }
        return 404, {"error": f"no {method} {path} here"}

    def _commit(self, body: bytes) -> tuple[int, Any]:
        if self.broken:
            return 403, {"error": "Forbidden: over quota"}
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.commits.append(value["summary"])
            elif line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[value["path"]] = self.blobs[value["oid"]]
        oid = f"{len(self.commits):040x}"
        return 200, {
            "commitUrl": f"{self.endpoint}/{next(iter(self.repos))}/commit/{oid}",
            "commitOid": oid,
            "success": True,
        }


@contextmanager
def fake_hub(**changes: Any) -> Iterator[FakeHub]:
    hub = FakeHub(**changes)

    class Handler(BaseHTTPRequestHandler):
        def _speak(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.tokens.add(self.headers.get("Authorization", ""))
            status, content = hub.answer(self.command, self.path, body)
            told = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            if "/resolve/" in self.path and status == 404:
                self.send_header("X-Error-Code", content["error"])
            self.send_header("Content-Length", str(len(told)))
            self.end_headers()
            self.wfile.write(told)

        do_GET = do_POST = do_PUT = do_HEAD = _speak  # noqa: N815

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
