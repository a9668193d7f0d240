"""A server with OpenAI's completions API (vLLM, llama-server, SGLang), asked with token ids."""

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import Annotated, Any, NamedTuple, NotRequired, TypeVar

import httpx
from annotated_types import Ge, MinLen
from pydantic import AfterValidator, Field, Strict, TypeAdapter, ValidationError
from pydantic_core import from_json, to_json
from typing_extensions import TypedDict

from ropecli.errors import EndpointError, first_fault, reason_of, shortened
from ropecli.messages import say

_ATTEMPTS, _PAUSE = 4, 1.0
"""Seconds of the first pause; each is twice the one before."""
_LONGEST_WAIT = 30.0
"""Seconds between attempts."""
_PROBED = 16
"""Tokens."""
_ROUNDED = 0.1
"""Nats. A server that gives log-probabilities after the bias would give 0."""
_BUSY, _REFUSED = (408, 429, 500, 502, 503, 504), (400, 413, 422)

# What a server answers, as far as it is read. Other keys are ignored.

LogProbability = Annotated[
    float, Field(strict=True, ge=-1e5, le=1e-3, allow_inf_nan=False), AfterValidator(lambda value: min(value, 0.0))
]
"""Nats. Logits minus their log-sum may round to slightly above 0; vLLM gives -9999 for what is impossible."""
_TokenId = Annotated[int, Strict(), Ge(0)]


class _Entry(TypedDict):
    id: NotRequired[_TokenId]
    logprob: LogProbability


class _Position(TypedDict):
    top_logprobs: list[_Entry]


class LogProbabilities(TypedDict, total=False):
    """token_logprobs, top_logprobs: of each token, as OpenAI and vLLM give them. content: as llama-server does."""

    token_logprobs: list[LogProbability | None] | None
    top_logprobs: list[dict[str, LogProbability] | None] | None
    content: list[_Position] | None


class Choice(TypedDict):
    text: str
    logprobs: NotRequired[LogProbabilities | None]


class _Completion(TypedDict):
    choices: Annotated[list[Choice], MinLen(1)]
    usage: NotRequired[dict[str, Any] | None]


class _Model(TypedDict):
    id: str
    owned_by: NotRequired[str | None]
    max_model_len: NotRequired[int | None]


class _Models(TypedDict):
    data: Annotated[list[_Model], MinLen(1)]


_Answer = TypeVar("_Answer")
_adapter = cache(TypeAdapter)


class ServedModel(NamedTuple):
    """name: without the API key. owner: what the server calls itself. max_length: tokens; None if unknown."""

    name: str
    owner: str
    max_length: int | None


class PromptRefusedError(EndpointError):
    """The server refuses this prompt, for example because it is too long."""


class Endpoint:
    """A server at an address such as http://localhost:8000 or .../v1.

    served_name: the model to ask; default: the only one. key_variable: the environment variable with the API key; the
    key is in no message and no report. timeout: seconds to wait for an answer. Raises EndpointError in every
    method.
    """

    def __init__(
        self, url: str, *, served_name: str | None = None, key_variable: str | None = None, timeout: float = 600.0
    ) -> None:
        self._key_variable, self._key = key_variable, ""
        if key_variable is not None:
            self._key = os.environ.get(key_variable, "")
            if not self._key.isascii() or not self._key.isprintable() or not self._key:
                raise EndpointError(f"The environment variable {key_variable} holds no API key.")
        try:
            address = httpx.URL(url.rstrip("/").removesuffix("/v1"))
        except httpx.InvalidURL:
            address = httpx.URL()
        if address.scheme not in ("http", "https") or not address.host or address.userinfo or address.query:
            raise EndpointError(
                "The server's address must be one such as http://localhost:8000. Pass a key in an environment "
                "variable: --api-key-env NAME."
            )
        self.url, self._served_name, self._timeout = str(address), served_name, timeout
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        times, limits = httpx.Timeout(timeout, connect=10.0), httpx.Limits(max_connections=None)
        self._client = httpx.Client(base_url=address, headers=headers, timeout=times, limits=limits)
        self._quiet_until = 0.0
        self.model = self._find_model()

    def complete(self, ids: Sequence[int], **options: Any) -> Choice:
        """What follows a prompt of token ids greedily, from /v1/completions. Raises PromptRefusedError too."""
        return self._complete(ids, **options)["choices"][0]

    def _complete(self, ids: Sequence[int], **options: Any) -> _Completion:
        body = {"model": self._model_id, "prompt": list(map(int, ids)), "temperature": 0.0, **options}
        return self._ask("POST", "/v1/completions", _Completion, json=body)

    def gives_prompt_losses(self, ids: Sequence[int]) -> bool:
        """Ask once: some servers ignore `echo` or refuse it."""
        try:
            return self._losses(ids[:_PROBED]) is not None
        except PromptRefusedError:
            return False

    def forces_exactly(self, ids: Sequence[int]) -> bool:
        """Return whether a token that it is made to generate has the log-probability of a token that it reads."""
        probe = ids[:_PROBED]
        forced, read = self._losses(probe, force=True), self._losses(probe)
        return bool(forced and read and abs(forced[-1] - read[-1]) < _ROUNDED)

    def prompt_losses(self, ids: Sequence[int]) -> list[float]:
        """-ln p of each token but the first, nats. Of a prompt as long as the server accepts, the last is generated."""
        losses = self._losses(ids, force=len(ids) == self.model.max_length)
        if losses is None:
            raise EndpointError(
                f"{self.url} gave no log-probabilities for a prompt of {len(ids)} tokens. Start it so that it does."
            )
        return losses

    def _losses(self, ids: Sequence[int], *, force: bool = False) -> list[float] | None:
        """-ln p of each token but the first; None where the server gives the generated token alone.

        force: let the server generate the last token instead of reading it. A value too many or too few would give
        every token its neighbour's loss, so only the known layout is read: null, a value per further token of the
        prompt, and one of the generated token, if the server does not say that it generated none.
        """
        options = {"logit_bias": {str(ids[-1]): 100}} if force else {}
        sent = ids[:-1] if force else ids
        answer = self._complete(sent, max_tokens=1, logprobs=1, echo=True, **options)
        values = logprobs_of(answer["choices"][0]).get("token_logprobs") or []
        if len(values) <= 1:
            return None
        generated = (answer.get("usage") or {}).get("completion_tokens")
        least, most = len(sent) + (force or generated != 0), len(sent) + 1
        if not least <= len(values) <= most or values[0] is not None or None in values[1:]:
            raise EndpointError(
                f"{self.url} gave {len(values)} log-probabilities, {values.count(None)} of them null, for a prompt of "
                f"{len(sent)} tokens and one generated token: {shortened(to_json(values).decode(), 100)}. "
                "Expected null for the first token and one value for each other. Update the server."
            )
        return [-value for value in values[1 : len(ids)] if value is not None]

    def greedy(self, ids: Sequence[int], limit: int, top: int) -> tuple[str, list[dict[str, float]]]:
        """The text that follows greedily, and ln p of the most probable tokens at each place, as far as they are given.

        Tokens are named by id or by text, as the server does.
        """
        choice = self.complete(ids, max_tokens=limit, logprobs=top)
        logprobs = logprobs_of(choice)
        by_id = [
            {str(entry["id"]): entry["logprob"] for entry in place["top_logprobs"] if "id" in entry}
            for place in logprobs.get("content") or []
        ]
        return choice["text"], [place for place in by_id or logprobs.get("top_logprobs") or [] if place]

    def tokenize(self, text: str) -> list[int] | None:
        """The ids that the server's tokenizer gives, without special tokens; None if it does not tell."""
        body = {"model": self._model_id, "prompt": text, "content": text, "add_special_tokens": False}
        try:
            return self._ask("POST", "/tokenize", dict[str, Any], json=body).get("tokens")
        except EndpointError:
            return None

    @cached_property
    def engine(self) -> str:
        """Name and version, as far as the server tells."""
        try:
            version = self._ask("GET", "/version", dict[str, Any]).get("version", "")
        except EndpointError:
            version = ""
        return self._hidden(f"{self.model.owner} {version}".strip())

    def _find_model(self) -> ServedModel:
        models = {entry["id"]: entry for entry in self._ask("GET", "/v1/models", _Models)["data"]}
        name = self._served_name or (next(iter(models)) if len(models) == 1 else None)
        if name not in models:
            fault = f"does not serve {name!r}" if name else "serves several models; choose one with --served-name"
            raise EndpointError(f"{self.url} {fault}. Served: {self._quote(', '.join(models))}.")
        model, self._model_id = models[name], name
        longest = model.get("max_model_len")
        if not longest:
            with contextlib.suppress(EndpointError, LookupError, TypeError):  # llama-server tells it elsewhere
                longest = self._ask("GET", "/props", dict[str, Any])["default_generation_settings"]["n_ctx"]
        return ServedModel(self._hidden(name), self._hidden(str(model.get("owned_by"))), longest)

    def _ask(self, method: str, path: str, kind: type[_Answer], **content: Any) -> _Answer:
        """Send a request; repeat it with growing pauses while the server is busy or loses the connection."""
        for attempt in range(_ATTEMPTS):
            last, pause = attempt + 1 == _ATTEMPTS, _PAUSE * 2**attempt
            try:
                response = self._client.request(method, path, **content)
            except httpx.TimeoutException:
                raise EndpointError(
                    f"{self.url} did not answer within {self._timeout:g} seconds. Increase --timeout, or ask for "
                    "shorter prompts."
                ) from None
            except httpx.HTTPError as error:
                if last or isinstance(error, httpx.ConnectError):
                    raise EndpointError(
                        f"{self.url} gives no answer: {self._quote(reason_of(error))}. Start the server, or correct "
                        "the address."
                    ) from None
            else:
                if last or response.status_code not in _BUSY:
                    break
                seconds = response.headers.get("Retry-After", "")
                pause = min(float(seconds), _LONGEST_WAIT) if seconds.isdecimal() else pause
            if time.monotonic() > self._quiet_until:  # of many requests in flight, one says it
                self._quiet_until = time.monotonic() + pause
                say(f"{self.url} is busy; asking again in {pause:g} seconds.")
            time.sleep(pause)
        return self._read(response, path, kind)

    def _read(self, response: httpx.Response, path: str, kind: type[_Answer]) -> _Answer:
        status, body = response.status_code, response.content
        if status >= 300:
            again = f" {_ATTEMPTS} times" if status in _BUSY else ""
            remedy = ""
            if status in (401, 403):
                key = f"Correct the key in {self._key_variable}" if self._key else "Pass a key with --api-key-env NAME"
                remedy = f". {key}."
            error_type = PromptRefusedError if status in _REFUSED else EndpointError
            raise error_type(f"{self.url}{path} answered {status}{again}: {self._reason(body)}{remedy}")
        try:
            return _adapter(kind).validate_json(body)  # type: ignore[arg-type]
        except ValidationError as error:
            got = error.errors(include_url=False)[0]["input"]
            text = body.decode(errors="replace") if got is body else to_json(got, inf_nan_mode="constants").decode()
            raise EndpointError(
                f"{self.url}{path} did not answer as OpenAI's API does ({self._quote(first_fault(error, 'body'))}): "
                f"{self._quote(text)}. Give the address of a server with that API, or update the server."
            ) from None

    def _reason(self, body: bytes) -> str:
        """The server's message, where it answers as OpenAI's API does; else the whole answer."""
        text = body.decode(errors="replace")
        with contextlib.suppress(ValueError, LookupError, TypeError):
            text = str(from_json(body)["error"]["message"])
        return self._quote(text)

    def _quote(self, text: str) -> str:
        """The server's text on one line, without the key."""
        return shortened(" ".join(self._hidden(text).split()), 300)

    def _hidden(self, text: str) -> str:
        """The text without the key. A server may give it back as any of its names."""
        return text.replace(self._key, "***") if self._key else text


def logprobs_of(choice: Choice) -> dict[str, Any]:
    """See LogProbabilities."""
    return {**(choice.get("logprobs") or {})}


def endpoint_of(url: str, options: Mapping[str, Any]) -> Endpoint:
    """Raises EndpointError."""
    names = {"served_name": options["served_name"], "key_variable": options["api_key_env"]}
    return Endpoint(url, **names, timeout=options["timeout"] or 600.0)
