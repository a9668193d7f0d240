"""`ropecli check-served`, against a small server that computes with transformers, and against servers that fail."""

import json

import pytest
import torch
from completions_server import CompletionsServer

KEY = "sk-never-printed"


@pytest.fixture(scope="module")
def logits_of(llama):
    """logits_of("yarn", 3.1, noise=0.02) -> the logits of the tiny Llama with this scaling, as a server computes them.

    noise: relative error of every weight, as quantization makes it.
    """
    from transformers import AutoModelForCausalLM

    from ropecli import live_patch, make_plan, make_spec, open_checkpoint

    def make(method: str = "none", factor: float = 1.0, noise: float = 0.0):
        model = AutoModelForCausalLM.from_pretrained(llama).eval()
        if method != "none":
            live_patch(model, make_plan(open_checkpoint(str(llama)), make_spec(method, factor)).positions.ropes)
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + noise * torch.randn_like(parameter))

        def logits(ids):
            with torch.inference_mode():
                return model(torch.tensor([ids])).logits[0]

        return logits

    return make


@pytest.fixture
def check(ropecli, yarn, corpus):
    """check(server, option, ...) -> the outcome of check-served for the tiny Llama with yarn ×4."""

    def call(server, *options):
        return ropecli("check-served", server.url, "--checkpoint", yarn, "--data", corpus, *options)

    return call


@pytest.mark.parametrize("like", ["vllm", "llama"])
@pytest.mark.parametrize("scaling", [("yarn", 4.0), ("none", 1.0), ("yarn", 2.3)])
def test_verdict_names_the_scaling_that_a_rounding_server_computes(check, logits_of, like, scaling):
    with CompletionsServer(logits_of(*scaling, noise=0.02), like=like, most=256).running() as server:
        outcome = check(server, "--json")
    right = scaling == ("yarn", 4.0)
    assert outcome.code == (0 if right else 3), outcome
    result = json.loads(outcome.out)
    assert result["verdict"] == ("served" if right else "not served")
    assert result["compared"] == ("prompt" if like == "vllm" else "next token")
    assert len(result["lengths"]) == (2 if like == "vllm" else 16)  # every eighth prompt decides
    assert result["max_length"] == 256
    if scaling[0] == "none":
        assert result["nearest"] == "unpatched"
    if not right:
        command = {"vllm": "vllm serve", "llama": "llama-server -m"}[like]
        assert result["fix"].startswith(command)
        assert "yarn" in result["fix"]


LIKE = ["vllm", "llama", "by text"]


@pytest.mark.parametrize("like", LIKE)
def test_scaling_unlike_all_readings_is_not_the_checkpoints(check, logits_of, tokenizer, like):
    """Its most probable tokens are not among those of the checkpoint."""
    wrong = logits_of("linear", 40.0, noise=0.02)
    with CompletionsServer(wrong, like=like, most=256, tokenizer=tokenizer).running() as server:
        outcome = check(server)
    assert outcome.code == 3, outcome
    assert "but not its scaling. Nearest: " in outcome.printed


@pytest.mark.parametrize("like", LIKE)
def test_verdict_is_unclear_for_other_weights(check, logits_of, tokenizer, like):
    other = logits_of(noise=2.0)
    with CompletionsServer(other, like=like, most=256, tokenizer=tokenizer).running() as server:
        outcome = check(server, "--json")
    assert outcome.code == 4, outcome
    result = json.loads(outcome.out)
    assert "has other weights, reads other tokens, or rounds too much" in result["reason"]
    assert len(result["lengths"]) == (2 if like == "vllm" else 128)


def test_prompt_leaves_room_for_an_answer_at_the_context_length(ropecli, patched, llama, logits_of, corpus):
    twice = patched(llama, "yarn", factor=2)
    arguments = ["--checkpoint", twice, "--data", corpus, "--json"]
    with CompletionsServer(logits_of("yarn", 2.0), like="vllm", most=128).running() as server:
        outcome = ropecli("check-served", server.url, *arguments)
    assert outcome.code == 0, outcome
    assert json.loads(outcome.out)["lengths"] == [63, 127]


def test_server_that_reads_the_pretraining_length_alone_is_unpatched(check, logits_of):
    with CompletionsServer(logits_of(), like="vllm", most=64).running() as server:
        outcome = check(server, "--json")
    assert outcome.code == 3, outcome
    result = json.loads(outcome.out)
    assert (result["nearest"], result["lengths"]) == ("unpatched", [63])
    assert result["readings"][0]["beyond"] is None


def test_prompts_stop_where_the_server_does(check, logits_of):
    """A server that does not state its limit refuses longer prompts."""
    with CompletionsServer(logits_of("yarn", 4.0), like="llama", most=100).running() as server:
        server.like = "other"  # no /props
        outcome = check(server)
    assert outcome.code == 0, outcome
    assert "Comparing up to 96 tokens" in outcome.err
    assert "Accepts at least 96 tokens." in outcome.out


@pytest.mark.parametrize(
    ("fault", "message", "from_start"),
    [
        ("half a JSON", "(body: Invalid JSON: EOF while parsing", False),
        ("HTML", "nginx", True),
        ("busy", "answered 429 4 times: too many requests", False),
        ("unauthorized", "Correct the key in ROPECLI_TEST_KEY.", True),
        ("broken", "answered 500 4 times: engine died on Bearer ***", False),
        ("closes", "gives no answer: ", True),
        ("slow", "did not answer within 0.5 seconds", False),
    ],
)
def test_failing_server_gets_one_message_without_the_key(check, logits_of, fault, message, from_start, monkeypatch):
    monkeypatch.setenv("ROPECLI_TEST_KEY", KEY)
    monkeypatch.setattr("ropecli.evaluation.completions._PAUSE", 0.01)
    with CompletionsServer(logits_of(), like="vllm", most=256, key=KEY).running() as server:
        if from_start:
            server.fault = fault
        else:  # after the first prompt
            complete = server.complete
            server.complete = lambda request: setattr(server, "fault", fault) or complete(request)
        outcome = check(server, "--api-key-env", "ROPECLI_TEST_KEY", "--timeout", 0.5)
    assert outcome.code == 2, outcome
    assert outcome.err.count("error:") == 1
    assert message in outcome.err
    assert f"Bearer {KEY}" in server.keys
    assert KEY not in outcome.out + outcome.err


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("http://127.0.0.1:9", (), "http://127.0.0.1:9 gives no answer: "),
        (f"user:{KEY}@localhost", (), "The server's address must be one such as http://localhost:8000."),
        (f"http://user:{KEY}@localhost", (), "Pass a key in an environment variable"),
        ("", ("--served-name", "other"), "does not serve 'other'. Served: served."),
        ("", ("--api-key-env", "ROPECLI_UNSET"), "The environment variable ROPECLI_UNSET holds no API key."),
        ("", (), "answered 401: Incorrect API key: None. Pass a key with --api-key-env NAME."),
    ],
)
def test_wrong_input_is_refused_before_the_model_is_loaded(ropecli, yarn, monkeypatch, url, options, message):
    monkeypatch.setattr("ropecli.live.loading.load_tokenizer", None)
    key = KEY if "401" in message else None
    with CompletionsServer(None, like="vllm", most=256, key=key).running() as server:
        outcome = ropecli("check-served", url or server.url, "--checkpoint", yarn, *options)
    assert outcome.code == 2
    assert message in outcome.err
    assert KEY not in outcome.out + outcome.err


def test_prompt_longer_than_the_server_reads_is_refused(ropecli, yarn):
    with CompletionsServer(None, like="vllm", most=200).running() as server:
        outcome = ropecli("check-served", server.url, "--checkpoint", yarn, "--length", 200)
    outcome.is_refused("--length is 200; the checkpoint and the server read at most 199 tokens.")


def test_checkpoint_without_a_scaling_is_refused(ropecli, llama):
    with CompletionsServer(None, like="vllm", most=256).running() as server:
        outcome = ropecli("check-served", server.url, "--checkpoint", llama)
    assert outcome.code == 2
    assert "has no scaling, so there is nothing to check" in outcome.err


def test_a_scaling_that_no_layer_can_show_is_refused(ropecli, llama, edited):
    """All layers that see the whole context are without positions; `export` says so too."""
    scaling = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    layers = {"model_type": "smollm3", "no_rope_layers": [0, 0], "rope_scaling": ...}
    folder = edited(llama, rope_parameters=scaling, max_position_embeddings=256, **layers)
    sentence = (
        "No layer that sees the whole context has rotary positions, so a scaling has no effect on distant tokens."
    )
    with CompletionsServer(None, like="vllm", most=256).running() as server:
        outcome = ropecli("check-served", server.url, "--checkpoint", folder)
    outcome.is_refused("there is nothing to check", sentence)
    assert sentence in ropecli("export", folder, "--engine", "vllm").succeeds().said
