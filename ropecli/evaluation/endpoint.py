"""A server with OpenAI's completions API (vLLM, llama-server, SGLang), asked with token ids."""

import json
import os
import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import httpx

from ropecli.errors import EndpointError, reason_of, shortened
from ropecli.messages import say

_ATTEMPTS, _PAUSE = 4, 1.0
"""Seconds of the first pause; each is twice the one before."""
_LONGEST_WAIT = 30.0
"""Seconds between attempts."""
_PROBED = 16
"""Tokens."""
_ROUNDED = 0.1
"""Nats. A server that gives log-probabilities after the bias would give 0."""
_BUSY = (408, 429, 500, 502, 503, 504)


class ServedModel(NamedTuple):
    """name: as requests name it. owner: what the server calls itself. max_length: tokens; None if unknown."""

    name: str
    owner: str
    max_length: int | None


class PromptRefusedError(EndpointError):
    """The server refuses this prompt, for example because it is too long."""


class Endpoint:
    """A server at an address such as http://localhost:8000 or .../v1.

    served_name: the model to ask; default: the only one. key_variable: the environment variable with the API key; the
    key is in no message. timeout: seconds for one answer. Raises EndpointError in every method.
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
        if address.scheme not in ("http", "https") or not address.host:
            raise EndpointError("The server's address must be one such as http://localhost:8000.")
        if address.userinfo or address.query:
            raise EndpointError("The address may hold a key. Pass it in an environment variable: --api-key-env NAME.")
        self.url, self._served_name, self._timeout = str(address), served_name, timeout
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        times, limits = httpx.Timeout(timeout, connect=10.0), httpx.Limits(max_connections=None)
        self._client = httpx.Client(base_url=address, headers=headers, timeout=times, limits=limits)
        self._quiet_until = 0.0
        self.model = self._find_model()

    def complete(self, ids: Sequence[int], **options: Any) -> dict[str, Any]:
        """The first choice of /v1/completions for a prompt of token ids. Raises PromptRefusedError too."""
        body = {"model": self.model.name, "prompt": list(map(int, ids)), "temperature": 0.0, **options}
        answer = self._ask("POST", "/v1/completions", json=body)
        choices = answer.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise EndpointError(
                f"{self.url}/v1/completions answered without choices: {self._quote(json.dumps(answer))}"
            )
        return choices[0]

    def gives_prompt_losses(self, ids: Sequence[int]) -> bool:
        """Ask once, and count: some servers ignore `echo` or refuse it."""
        probe = ids[:_PROBED]
        try:
            return len(self._losses(probe)) == len(probe) - 1
        except PromptRefusedError:
            return False

    def forces_exactly(self, ids: Sequence[int]) -> bool:
        """Whether a token that it is made to generate has the log-probability of a token that it reads."""
        probe = ids[:_PROBED]
        return abs(self._losses(probe, force=True)[-1] - self._losses(probe)[-1]) < _ROUNDED

    def prompt_losses(self, ids: Sequence[int]) -> list[float]:
        """-ln p of each token but the first, nats. Of a prompt as long as the server accepts, the last is generated."""
        losses = self._losses(ids, force=len(ids) == self.model.max_length)
        if len(losses) != len(ids) - 1:
            raise EndpointError(f"{self.url} gave {len(losses)} log-probabilities for {len(ids)} tokens.")
        return losses

    def _losses(self, ids: Sequence[int], *, force: bool = False) -> list[float]:
        """force: let the server generate the last token instead of reading it."""
        options = {"logit_bias": {str(ids[-1]): 100}} if force else {}
        choice = self.complete(ids[:-1] if force else ids, max_tokens=1, logprobs=1, echo=True, **options)
        values = (logprobs_of(choice).get("token_logprobs") or [])[1 : len(ids)]
        return [-float(value) for value in values if isinstance(value, int | float)]

    def continuation(self, ids: Sequence[int], limit: int) -> str:
        """The text that follows greedily, of up to `limit` tokens."""
        text = self.complete(ids, max_tokens=limit).get("text")
        if not isinstance(text, str):
            raise EndpointError(f"{self.url}/v1/completions answered without text.")
        return text

    def tokenize(self, text: str) -> list[int] | None:
        """The ids that the server's tokenizer gives, without special tokens; None if it does not tell."""
        body = {"model": self.model.name, "prompt": text, "content": text, "add_special_tokens": False}
        try:
            tokens = self._ask("POST", "/tokenize", json=body).get("tokens")
        except EndpointError:
            return None
        return tokens if isinstance(tokens, list) and all(isinstance(token, int) for token in tokens) else None

    @cached_property
    def engine(self) -> str:
        """Name and version, as far as the server tells."""
        try:
            version = self._ask("GET", "/version").get("version", "")
        except EndpointError:
            version = ""
        return f"{self.model.owner} {version}".strip()

    def _find_model(self) -> ServedModel:
        listed = self._ask("GET", "/v1/models").get("data")
        models = {str(entry["id"]): entry for entry in listed or [] if isinstance(entry, dict) and "id" in entry}
        name = self._served_name or (next(iter(models)) if len(models) == 1 else None)
        if not models:
            raise EndpointError(f"{self.url}/v1/models lists no model.")
        if name not in models:
            fault = f"does not serve {name!r}" if name else "serves several models; choose one with --served-name"
            raise EndpointError(f"{self.url} {fault}. Served: {', '.join(models)}.")
        longest = models[name].get("max_model_len")
        if longest is None:
            longest = self._context_of_llama_server()
        return ServedModel(name, str(models[name].get("owned_by")), longest if isinstance(longest, int) else None)

    def _context_of_llama_server(self) -> Any:
        try:
            settings = self._ask("GET", "/props").get("default_generation_settings")
        except EndpointError:
            return None
        return settings.get("n_ctx") if isinstance(settings, dict) else None

    def _ask(self, method: str, path: str, **content: Any) -> dict[str, Any]:
        """Send a request; repeat it with growing pauses while the server is busy or loses the connection."""
        for attempt in range(1, _ATTEMPTS + 1):
            last, pause = attempt == _ATTEMPTS, _PAUSE * 2 ** (attempt - 1)
            try:
                response = self._client.request(method, path, **content)
            except httpx.TimeoutException:
                raise EndpointError(
                    f"{self.url} did not answer within {self._timeout:g} seconds. Increase --timeout, or ask for "
                    "shorter prompts."
                ) from None
            except httpx.ConnectError as error:
                raise EndpointError(
                    f"No server answers at {self.url} ({reason_of(error)}). Start it, or correct the address."
                ) from None
            except httpx.HTTPError as error:
                if last:
                    raise EndpointError(
                        f"{self.url} closed the connection {attempt} times ({reason_of(error)})."
                    ) from None
            else:
                if response.status_code not in _BUSY or last:
                    return self._read(response, path)
                pause = self._pause(response, pause)
            if time.monotonic() > self._quiet_until:  # of many requests in flight, one says it
                self._quiet_until = time.monotonic() + pause
                say(f"{self.url} is busy; asking again in {pause:g} seconds.")
            time.sleep(pause)
        raise AssertionError

    def _pause(self, response: httpx.Response, usual: float) -> float:
        """Seconds until the next attempt, as the server asks."""
        try:
            return min(max(float(response.headers["Retry-After"]), 0.0), _LONGEST_WAIT)
        except (KeyError, ValueError):
            return usual

    def _read(self, response: httpx.Response, path: str) -> dict[str, Any]:
        status, text = response.status_code, response.text
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        if status in (401, 403):
            remedy = "Correct the key in" if self._key_variable else "Set --api-key-env to"
            variable = self._key_variable or "the environment variable that holds the API key"
            raise EndpointError(f"{self.url} refuses the request ({status}). {remedy} {variable}.")
        if status in (400, 413, 422):
            raise PromptRefusedError(f"{self.url} refuses the request ({status}): {self._reason(answer, text)}")
        if status >= 300:
            again = f" {_ATTEMPTS} times" if status in _BUSY else ""
            raise EndpointError(f"{self.url}{path} answered {status}{again}: {self._reason(answer, text)}")
        if not isinstance(answer, dict):
            raise EndpointError(
                f"{self.url}{path} did not answer in JSON: {self._quote(text)} Give the address of a server with "
                "OpenAI's completions API."
            )
        return answer

    def _reason(self, answer: Any, text: str) -> str:
        """The server's own message."""
        error = answer.get("error", answer) if isinstance(answer, dict) else None
        message = error.get("message") or error.get("detail") if isinstance(error, dict) else error
        return self._quote(str(message or text))

    def _quote(self, text: str) -> str:
        """The server's text on one line, without the key."""
        return shortened(" ".join((text.replace(self._key, "***") if self._key else text).split()), 300)


def logprobs_of(choice: dict[str, Any]) -> dict[str, Any]:
    found = choice.get("logprobs")
    return found if isinstance(found, dict) else {}
