"""Measured at a server: the numbers of transformers, many requests in flight, and one message for what goes wrong."""

import signal
import threading

import pytest
import torch
from completions_server import CompletionsServer

from ropecli.evaluation.readers import endpoint


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
        needed = {"eval-ppl": ["--lengths", "24,256", "--max-documents", 6], "passkey": ["--samples", 2]}[name]
        data = ["--data", corpus] if name == "eval-ppl" else ["--lengths", "250,256", "--depths", "0,1"]
        return ropecli(name, checkpoint, *data, *needed, *options)

    return call


@pytest.mark.parametrize(
    "arguments",
    [
        ["eval-ppl"],
        ["eval-ppl", "--protocol", "tail"],
        ["eval-ppl", "--protocol", "sliding", "--max-tokens", 150],
        ["passkey"],
        ["passkey", "--mode", "generate"],
    ],
)
def test_a_server_gives_the_numbers_of_transformers(arguments, measure, served):
    own = measure(*arguments, "--json").json()
    with served(delay=0.01).running() as server:
        report = measure(*arguments, "--endpoint", server.url, "--requests", 4, "--json").json()
        assert 1 < server.most_waiting <= 4
    assert report["device"] == f"vllm 0.0.1 at {server.url}"
    assert report["settings"]["engine"] == "vllm 0.0.1"
    assert report["fingerprint"] == own["fingerprint"]
    for cell, other in zip(report["cells"], own["cells"], strict=True):
        assert cell["sums"] == pytest.approx(other["sums"], abs=1e-3)
        assert cell["weights"] == other["weights"]


def test_requests_in_flight_share_the_time(monkeypatch):
    seconds = iter([0.0, 10.0, 14.0, 20.0])
    monkeypatch.setattr(endpoint.time, "perf_counter", lambda: next(seconds))
    reader = endpoint.EndpointReader(None, None, in_flight=2)
    first, second = reader.measured(), reader.measured()
    costs = [first.__enter__(), second.__enter__()]
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert [cost.seconds for cost in costs] == [12.0, 8.0]


def test_a_server_that_dies_costs_what_was_in_flight(measure, served, tmp_path):
    """One message, and --resume asks for the rest alone."""
    arguments = ["eval-ppl", "--protocol", "tail", "--requests", 2, "--output", tmp_path / "report.json", "--json"]
    expected = measure(*arguments[:3], "--json").json()
    with served().running() as server:
        server.stops_after = 9  # four to find out what it gives
        outcome = measure(*arguments, "--endpoint", server.url)
        assert outcome.code == 2
        assert outcome.err.count("error:") == 1
        assert "answered 500 4 times: engine died" in outcome.err
        server.fault, server.prompts, server.stops_after = None, [], -1
        report = measure(*arguments, "--endpoint", server.url, "--resume").json()
    assert 5 + 12 - 6 <= len(server.prompts) <= 5 + 12 - 2  # one more to see whether the model is the same
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
    "continues": ("llama", ["passkey", "--mode", "generate"]),
    "answers alone": ("text", ["passkey", "--mode", "generate"]),
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


def test_a_model_that_changes_within_a_run_gives_no_report(measure, served, other, tmp_path):
    """Not with --resume either, whatever is served then."""
    arguments = ["eval-ppl", "--protocol", "tail", "--output", tmp_path / "report.json"]
    with served().running() as server:
        first, answer = server.logits, server.complete

        def complete(request):
            server.logits = other("yarn") if len(server.prompts) > 8 else first
            return answer(request)

        server.complete = complete
        assert "are of both, so there is no report" in measure(*arguments, "--endpoint", server.url).err
        server.complete, server.logits = answer, first
        again = measure(*arguments, "--endpoint", server.url, "--resume")
    again.is_refused("Keep one model served, delete")
    assert not (tmp_path / "report.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "yarn", "--factor", 4], "A server computes the scaling that it was started with."),
        (["--dtype", "bfloat16"], "With --endpoint ropecli loads no model."),
        (["--baseline", "demo"], "With --endpoint ropecli loads no model."),
        (["--lengths", "24,257"], "accepts 256 tokens; --lengths asks for 257."),
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
        assert measure("passkey", "--endpoint", server.url, "--mode", "generate").code == 0


def test_another_tokenizer_and_a_second_checkpoint_are_refused(measure, served, ropecli, llama, corpus):
    with served().running() as server:
        measure("eval-ppl", "--endpoint", server.url, checkpoint="demo").is_refused("is not that of demo.")
        data = ["--data", corpus, "--lengths", 24]
        asked = ropecli("compare", llama, "demo", "--methods", "as-is", *data, "--endpoint", server.url)
        asked.is_refused("serves one checkpoint. Measure the others in runs of their own.")
        ropecli("compare", llama, "--methods", "as-is", *data, "--endpoint", server.url).succeeds()
    ropecli("eval-ppl", llama, *data, "--requests", 3).is_refused("--requests needs --endpoint.")
