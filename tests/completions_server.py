"""A small server with OpenAI's completions API: a model's real log-probabilities, or a fault."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

Logits = Callable[[list[int]], torch.Tensor]
"""Token ids -> logits, shape (tokens, vocabulary)."""
FAULTS = {
    "half a JSON": (200, {}, '{"object": "list", "da'),
    "HTML": (200, {"Content-Type": "text/html"}, "<html><body>nginx</body></html>"),
    "busy": (429, {"Retry-After": "0"}, '{"error": {"message": "too many requests"}}'),
    "unauthorized": (401, {}, '{"error": {"message": "Incorrect API key: %s"}}'),
    "broken": (500, {"Retry-After": "0"}, '{"error": {"message": "engine died on %s"}}'),
}


class CompletionsServer:
    """url: its address. keys: the API keys that it was sent. prompts: lengths of the prompts that it answered.

    like: vllm, llama, or text, which gives no log-probabilities. tokenizer: of the model, to answer in text. delay:
    seconds per answer. stops_after: answers until it breaks. most_waiting: the most requests at one time. odd: by path,
    what it answers instead: status, headers, content.
    """

    def __init__(
        self, logits: Logits, *, like: str, most: int, key: str | None = None, tokenizer: Any = None, delay: float = 0.0
    ) -> None:
        self.logits, self.like, self.most, self.key = logits, like, most, key
        self.tokenizer, self.delay, self.stops_after = tokenizer, delay, -1
        self.lock, self.waiting, self.most_waiting = threading.Lock(), 0, 0
        self.fault: str | None = None
        self.odd: dict[str, tuple[int, dict[str, str], bytes]] = {}
        self.keys: list[str | None] = []
        self.prompts: list[int] = []
        self.url = ""

    def models(self) -> dict[str, Any]:
        stated = {"max_model_len": self.most} if self.like in ("vllm", "text") else {}
        return {"data": [{"id": "served", "owned_by": "vllm" if self.like == "vllm" else "llamacpp", **stated}]}

    def complete(self, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        ids, room = request["prompt"], request["max_tokens"]
        if len(ids) + room > self.most:
            return 400, {"error": {"message": f"the prompt has {len(ids)} tokens, more than {self.most}"}}
        self.prompts.append(len(ids))
        with self.lock:
            self.waiting += 1
            self.most_waiting = max(self.most_waiting, self.waiting)
        time.sleep(self.delay)
        with self.lock:
            self.waiting -= 1
            if 0 <= self.stops_after <= len(self.prompts):  # two may arrive before either is answered
                self.fault = "broken"
            return 200, {"choices": [self.choice(list(ids), room, request)]}

    def choice(self, ids: list[int], room: int, request: dict[str, Any]) -> dict[str, Any]:
        if "logprobs" not in request or self.like == "text":  # greedy text
            count = len(ids)
            for _ in range(room):
                ids.append(int(self.logits(ids)[-1].argmax()))
            return {"text": self.tokenizer.decode(ids[count:])}
        values = self.logits(ids).double().log_softmax(-1)
        best = values[-1].topk(request["logprobs"])
        top = [(int(token), float(value)) for token, value in zip(best.indices, best.values, strict=True)]
        if self.like == "vllm":
            for token in request.get("logit_bias", ()):
                top = [(int(token), float(values[-1, int(token)]))]
            own = values[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
            return {"text": "", "logprobs": {"token_logprobs": [None, *own, top[0][1]][: len(ids) + room]}}
        if self.like == "by text":
            return {
                "text": "",
                "logprobs": {"top_logprobs": [{self.tokenizer.decode([token]): value for token, value in top}]},
            }
        entries = [{"id": token, "token": "?", "logprob": value} for token, value in top]
        return {"text": "", "logprobs": {"content": [{"top_logprobs": entries}]}}

    @contextlib.contextmanager
    def running(self) -> Iterator["CompletionsServer"]:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def send(self, status: int, body: str, headers: dict[str, str] | None = None) -> None:
                content = body.encode()
                if self.path in owner.odd:
                    status, headers, content = owner.odd[self.path]
                self.send_response(status)
                for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                sent = self.headers.get("Authorization")
                owner.keys.append(sent)
                if owner.fault in FAULTS:
                    status, headers, body = FAULTS[owner.fault]
                    self.send(status, body.replace("%s", str(sent)), headers)
                elif owner.fault == "slow":
                    time.sleep(3)
                elif owner.fault == "closes":
                    self.close_connection = True
                elif owner.key is not None and sent != f"Bearer {owner.key}":
                    self.send(401, json.dumps({"error": {"message": f"Incorrect API key: {sent}"}}))
                elif self.path == "/v1/models":
                    self.send(200, json.dumps(owner.models()))
                elif self.path == "/version" and owner.like == "vllm":
                    self.send(200, '{"version": "0.0.1"}')
                elif self.path == "/props" and owner.like == "llama":
                    self.send(200, json.dumps({"default_generation_settings": {"n_ctx": owner.most}}))
                else:
                    self.send(404, '{"error": "not found"}')

            def do_POST(self) -> None:
                refused = owner.key and self.headers.get("Authorization") != f"Bearer {owner.key}"
                if owner.fault is not None or refused or self.path in owner.odd:
                    return self.do_GET()
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/tokenize" and owner.tokenizer:
                    tokens = owner.tokenizer(request["prompt"], add_special_tokens=False)["input_ids"]
                    return self.send(200, json.dumps({"tokens": tokens}))
                if self.path != "/v1/completions":
                    return self.send(404, '{"error": "not found"}')
                status, answer = owner.complete(request)
                self.send(status, json.dumps(answer))
                return None

            def log_message(self, *arguments: object) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
