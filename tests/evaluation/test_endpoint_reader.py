"""Measured at a server: the numbers of transformers, many requests in flight, and one message for what goes wrong."""

import contextlib
import json
import re
import signal
import socket
import threading

import pytest
import torch
from completions_server import CompletionsServer

from ropecli.errors import EndpointError
from ropecli.evaluation.completions import Endpoint


@pytest.fixture(scope="module")
def served(llama, loaded, tokenizer):
    """served(like="vllm", most=256, ...) -> a server of the tiny Llama. Longer prompts leave no room for an answer."""
    model = loaded(llama)

    def logits(ids):
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0]

    def make(like="vllm", most=256, **options):
        return CompletionsServer(logits, like=like, most=most, tokenizer=tokenizer, **options)

    return make


@pytest.fixture
def measure(ropecli, llama, corpus):
    """measure("eval-ppl", option, ...) -> the outcome, with what the command needs."""

    def call(name, *options, checkpoint=llama):
        needed = {
            "eval-ppl": ["--lengths", "24,256", "--max-documents", 6],
            "needle": ["--lengths", "250,256", "--depths", "0,1", "--samples", 2],
        }[name]
        data = [] if "--style" in options else ["--data", corpus / "text00.txt" if name == "needle" else corpus]
        return ropecli(name, checkpoint, *data, *needed, *options)

    return call


@pytest.mark.parametrize(
    "arguments",
    [
        ["eval-ppl", "--protocol", "tail"],
        ["eval-ppl", "--protocol", "sliding", "--max-tokens", 150],
        ["needle"],
        ["needle", "--mode", "generate"],
    ],
)
def test_a_server_gives_the_numbers_of_transformers(arguments, measure, served):
    own = measure(*arguments, "--json").report()
    with served(delay=0.01).running() as server:
        report = measure(*arguments, "--endpoint", server.url, "--requests", 4, "--json").report()
        assert 1 < server.most_waiting <= 4
    assert report["device"] == f"vllm 0.0.1 at {server.url}"
    assert report["settings"]["engine"] == "vllm 0.0.1"
    assert report["fingerprint"] == own["fingerprint"]
    for cell, other in zip(report["cells"], own["cells"], strict=True):
        assert cell["sums"] == pytest.approx(other["sums"], abs=1e-3)
        assert cell["weights"] == other["weights"]


def test_a_server_that_dies_costs_what_was_in_flight(measure, served, tmp_path):
    """One message, and --resume asks for the rest alone."""
    arguments = ["eval-ppl", "--protocol", "tail", "--requests", 2, "--output", tmp_path / "report.json", "--json"]
    expected = measure(*arguments[:3], "--json").report()
    with served().running() as server:
        server.stops_after = 9  # four to find out what it gives
        outcome = measure(*arguments, "--endpoint", server.url)
        assert outcome.code == 2
        assert outcome.err.count('{"error":') == 1
        assert "answered 500 4 times: engine died" in outcome.err
        server.fault, server.prompts, server.stops_after = None, [], -1
        report = measure(*arguments, "--endpoint", server.url, "--resume").report()
    assert 4 + 12 - 6 <= len(server.prompts) <= 4 + 12 - 2  # four to see what it gives, and whether it is the same
    for cell, other in zip(report["cells"], expected["cells"], strict=True):
        assert cell["sums"] == pytest.approx(other["sums"], abs=1e-3)


def test_ctrl_c_does_not_wait_for_answers_in_flight(measure, tokenizer):
    released, pressed, answered = threading.Event(), [], []

    def logits(ids):
        if len(server.prompts) > 4:  # four to find out what it gives
            if not pressed:
                pressed.append(signal.pthread_kill(threading.main_thread().ident, signal.SIGINT))
            answered.append(released.wait(30))
        return torch.zeros(len(ids), len(tokenizer))

    server = CompletionsServer(logits, like="vllm", most=256, tokenizer=tokenizer)
    with server.running():
        outcome = measure("eval-ppl", "--endpoint", server.url)
        assert (outcome.code, answered) == (130, [])
        released.set()


@pytest.fixture
def other(llama, patched, loaded):
    """other("yarn") -> logits of the tiny Llama with another scaling, or as coarse as bfloat16."""

    def make(kind):
        model = loaded(patched(llama, "yarn", factor=2) if kind == "yarn" else llama)

        def logits(ids):
            with torch.inference_mode():
                values = model(torch.tensor([ids])).logits[0]
            return values if kind == "yarn" else values + 0.05 * torch.randn_like(values)

        return logits

    return make


HOW = {
    "reads": ("vllm", ["eval-ppl", "--protocol", "tail"]),
    "answers alone": ("text", ["needle", "--mode", "generate"]),
}


@pytest.mark.parametrize("how", HOW)
def test_resume_refuses_another_model_behind_the_same_name(how, measure, served, other, tmp_path):
    like, arguments = HOW[how]
    arguments = [*arguments, "--requests", 1, "--output", tmp_path / "report.json"]
    with served(like=like).running() as server:
        first, server.stops_after = server.logits, 6
        assert measure(*arguments, "--endpoint", server.url).code == 2
        server.fault, server.stops_after, server.logits = None, -1, other("yarn")
        refused = measure(*arguments, "--endpoint", server.url, "--resume")
        refused.is_refused("serves another model or scaling than when this run began")
        assert "Serve what the run began with, and resume it; or delete" in refused.err
        server.logits = first if like == "text" else other("rounds")
        measure(*arguments, "--endpoint", server.url, "--resume").succeeds()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "yarn", "--factor", 4], "A server has one checkpoint, and the scaling that it was started with."),
        (["--dtype", "bfloat16"], "With --endpoint ropecli loads no model."),
        (["--baseline", "demo"], "With --endpoint ropecli loads no model."),
        (["--lengths", "24,257"], "reads up to 256 tokens; the longest sample needs 257."),
        (["--served-name", "other"], "does not serve 'other'. Served: served."),
    ],
)
def test_what_a_server_cannot_do_is_refused_before_reading(arguments, message, measure, served):
    with served().running() as server:
        measure("eval-ppl", *arguments, "--endpoint", server.url).is_refused(message)
        assert len(server.prompts) <= 1


def test_a_server_without_prompt_losses_measures_generated_answers_alone(measure, served):
    with served(like="llama").running() as server:
        refused = measure("eval-ppl", "--endpoint", server.url)
        refused.is_refused("no log-probabilities of a prompt's tokens, which prefix needs")
        assert measure("needle", "--endpoint", server.url, "--mode", "generate").code == 0


def test_another_tokenizer_and_a_second_checkpoint_are_refused(measure, served, ropecli, llama, corpus):
    with served().running() as server:
        measure("eval-ppl", "--endpoint", server.url, checkpoint="demo").is_refused("is not that of demo.")
        data = ["--data", corpus, "--lengths", 24]
        asked = ropecli("compare", llama, "demo", "--methods", "as-is", *data, "--endpoint", server.url)
        asked.is_refused("measure it alone and without --method")
        ropecli("compare", llama, "--methods", "as-is", *data, "--endpoint", server.url).succeeds()
    ropecli("eval-ppl", llama, *data, "--requests", 3).is_refused("--requests has no effect without --endpoint.")


THINKS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)


@pytest.fixture
def thinking(edited, llama, ropecli, tokenizer, corpus):
    """thinking(words) -> ask(option, ...) of a server whose model thinks for this many words, then gives the key."""
    folder = edited(llama)
    (folder / "chat_template.jinja").write_text(THINKS)

    def answer(ids, room, words):
        prompt = tokenizer.decode(ids)
        key = (re.findall(r"number of \w+ is (\d+)", prompt) or ["unknown"])[0]  # the probes are parts of a prompt
        ended = "</think>" in prompt.rpartition("[assistant]")[2]
        said = key if ended else f"<think>\n{'Or ' * words}</think>\n\nIt is {key}."
        return {"text": tokenizer.decode(tokenizer(said)["input_ids"][:room])}

    @contextlib.contextmanager
    def serve(words):
        server = CompletionsServer(lambda ids: None, like="text", most=700, tokenizer=tokenizer)
        server.choice = lambda ids, room, request: answer(ids, room, words)
        needle = ["--data", corpus / "text00.txt", "--lengths", 300, "--samples", 2, "--depths", 0.5]
        needle += ["--mode", "generate"]
        with server.running():
            yield lambda *options: ropecli("needle", folder, *needle, "--endpoint", server.url, *options)

    return serve


@pytest.mark.parametrize(
    ("words", "options", "found", "note"),
    [
        (20, [], 0, "2 of 2 answers have a thought"),
        (20, ["--thinking", "off"], 1, ""),
        (20, ["--thinking", 200], 1, ""),
        (300, ["--thinking", 100], 1, "2 of 2 thoughts did not end within 100 tokens and were cut."),
    ],
)
def test_a_thought_is_no_answer(words, options, found, note, thinking):
    with thinking(words) as ask:
        outcome = ask(*options).succeeds()
        assert (note or "Guessing") in outcome.printed
        assert (" thought" in outcome.printed) == bool(note)
        assert [row["value"] for row in ask(*options, "--json").report()["rows"]] == [found]


def test_thinking_that_cannot_be_is_refused(thinking, measure):
    with thinking(20) as ask:
        ask("--thinking", 500).is_refused("reads up to 700 tokens; the longest sample needs 816")
        ask("--thinking", "on").is_refused("--thinking is 'on'; expected off, or a number of tokens, such as 2k.")
    measure("needle", "--style", "passkey", "--mode", "generate", "--thinking", "off").is_refused(
        "--thinking needs a chat template"
    )


def test_an_answer_may_fill_the_context_of_a_server_that_does_not_force_a_token(measure, served):
    with served().running() as server:
        choice = server.choice
        server.choice = lambda ids, room, request: choice(ids, room, {**request, "logit_bias": ()})
        measure("eval-ppl", "--endpoint", server.url).is_refused(
            "reads up to 255 tokens; the longest sample needs 256."
        )
        measure("needle", "--style", "passkey", "--endpoint", server.url, "--mode", "generate").succeeds()


MODELS, COMPLETIONS = "/v1/models", "/v1/completions"
FOUR = [11, 12, 13, 14]
"""A prompt. The server gives null for its first token, then a value per token, then one of the generated token."""


@pytest.fixture
def odd():
    """odd(path, answer, status, **headers) -> the address of a server of which one answer is odd: bytes, or JSON."""
    server = CompletionsServer(lambda ids: torch.zeros(len(ids), 99), like="vllm", most=64)

    def make(path, answer, status=200, **headers):
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        server.odd = {path: (status, {name.replace("_", "-"): value for name, value in headers.items()}, content)}
        return server.url

    with server.running():
        yield make


def completion(values, **more):
    return {"choices": [{"text": "", "logprobs": {"token_logprobs": values}}], **more}


@pytest.mark.parametrize(
    ("answer", "losses"),
    [
        (completion([None, -2, -1.5, -0.0, -3.0]), [2.0, 1.5, 0.0]),
        (completion([None, -2, -1.5, 1e-6, -3.0]), [2.0, 1.5, 0.0]),  # rounded
        (completion([None, -2, -1.5, -1.0], usage={"completion_tokens": 0}), [2.0, 1.5, 1.0]),  # ended at once
    ],
)
def test_known_layouts_of_log_probabilities_are_read(answer, losses, odd):
    assert Endpoint(odd(COMPLETIONS, answer)).prompt_losses(FOUR) == losses


@pytest.mark.parametrize(
    ("values", "came"),
    [
        ([None, -1, -1, -1, -1, -1], "gave 6 log-probabilities, 1 of them null, for a prompt of 4 tokens"),
        ([-1, -1, -1, -1, -1], "gave 5 log-probabilities, 0 of them null"),
        ([None, -1, 2.5, -1, -1], "token_logprobs.2: Input should be less than or equal to 0.001): 2.5"),
        ([None, -1, "-1", -1, -1], 'token_logprobs.2: Input should be a valid number): "-1"'),
        ([None, -1, float("nan"), -1, -1], "token_logprobs.2: Input should be a finite number): NaN"),
    ],
)
def test_other_log_probabilities_are_refused_with_what_came(values, came, odd):
    server = Endpoint(odd(COMPLETIONS, completion(values)))
    for ask in (server.gives_prompt_losses, server.prompt_losses):
        with pytest.raises(EndpointError) as error:
            ask(FOUR)
        assert came in str(error.value)


@pytest.mark.parametrize(
    ("path", "answer", "more", "message"),
    [
        (MODELS, {"data": 5}, {}, "data: Input should be a valid array): 5"),
        (MODELS, b"[" * 100_000, {}, "recursion limit exceeded"),
        (MODELS, b'{"data": "\xff"}', {}, "body: Invalid JSON"),
        (MODELS, b"moved", {"status": 302, "Location": "/elsewhere"}, "/v1/models answered 302: moved"),
        (MODELS, b"\x1f\x8b garbage", {"Content_Encoding": "gzip"}, "gives no answer: Error -3 while decompressing"),
        (COMPLETIONS, {"choices": []}, {}, "choices: List should have at least 1 item"),
        (COMPLETIONS, {"error": [{"message": 5}]}, {"status": 400}, 'answered 400: {"error": [{"message": 5}]}'),
        (COMPLETIONS, b'{"error": "\\ud800"}', {"status": 500, "Retry_After": "0"}, "answered 500 4 times"),
        (COMPLETIONS, b"", {"status": 429, "Retry_After": "nan"}, "answered 429 4 times"),
        (COMPLETIONS, b"", {"status": 503, "Retry_After": "Wed, 21 Oct 2026 07:28:00 GMT"}, "answered 503 4 times"),
    ],
)
def test_odd_answers_get_one_message(path, answer, more, message, odd, monkeypatch):
    monkeypatch.setattr("ropecli.evaluation.completions._PAUSE", 0.01)
    with pytest.raises(EndpointError) as error:
        Endpoint(odd(path, answer, **more)).complete(FOUR, max_tokens=2)
    assert message in str(error.value)


def test_a_server_that_does_not_answer_in_time_is_named():
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        pytest.raises(EndpointError, match=r"did not answer within 0.1 seconds"),
    ):
        Endpoint(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=0.1)


def test_a_key_that_comes_back_as_a_name_is_in_no_report(measure, served, monkeypatch):
    key = "sk-never-printed"
    monkeypatch.setenv("ROPECLI_TEST_KEY", key)
    with served(key=key).running() as server:
        server.models = lambda: {"data": [{"id": key, "owned_by": f"of {key}", "max_model_len": 256}]}
        server.odd["/version"] = (200, {}, json.dumps({"version": key}).encode())
        outcome = measure("eval-ppl", "--endpoint", server.url, "--api-key-env", "ROPECLI_TEST_KEY", "--json")
        settings = outcome.report()["settings"]
    assert (settings["engine"], settings["served"]) == ("of *** ***", "***")
    assert "never" not in outcome.out + outcome.err
