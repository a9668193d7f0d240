"""Models spread over devices by Accelerate: over CPU and disk."""

import numpy as np
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from tiny_settings import EXPERTS, LATENT, ONE_OF_EACH

from ropecli.attention import load_model
from ropecli.attention.patching import live_patch
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.checkpoint.patch_plan import make_plan
from ropecli.evaluation.readers.live import LiveReader
from ropecli.live.devices import device_names, input_device
from ropecli.scaling.spec import make_spec

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
TYPES = {
    "tied weights": ("qwen2", {"tie_word_embeddings": True}, None),
    "a soft cap": ("gemma2", {"head_dim": 32, **ONE_OF_EACH}, None),
    "fused experts, which differ from the files": ("mixtral", {"head_dim": 32, **EXPERTS}, None),
    "latent attention": ("deepseek_v3", LATENT, None),
    "frequencies that follow the length": ("llama", {"head_dim": 32, "rope_parameters": DYNAMIC}, None),
    "reading in chunks": ("llama", {"head_dim": 32}, 24),
}


def spread(folder, **options):
    """The model with some of its weights in memory, the rest on disk."""
    checkpoint = open_checkpoint(folder)
    size = sum(path.stat().st_size for path in checkpoint.weight_files())
    return load_model(checkpoint, device_map="auto", max_memory={"cpu": 3 * size // 4}, **options)


@pytest.mark.parametrize(("model_type", "settings", "chunk"), TYPES.values(), ids=TYPES)
def test_losses_with_offloaded_weights_equal_those_of_one_device(
    model_type, settings, chunk, build, loaded, documents, evaluate, caplog
):
    folder = build(model_type, **settings)
    model = spread(folder)
    assert [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert input_device(model) == torch.device("cpu")
    assert device_names(model) == "cpu,disk"
    expected = evaluate(loaded(folder), documents, [32, 100])
    cells = evaluate(model, documents, [32, 100], chunk=chunk)
    assert not caplog.records
    assert [cell.value for cell in cells] == pytest.approx([cell.value for cell in expected], rel=1e-6)


def test_a_hook_on_the_decoder_stays(llama, loaded):
    """As Accelerate's, which moves the inputs to the GPU of a decoder whose head is on another one."""
    model, read = loaded(llama), []

    class Counting(ModelHook):
        def pre_forward(self, module, *arguments, **named):
            read.append(named["input_ids"].shape)
            return arguments, named

    add_hook_to_module(model.model, Counting())
    reader = LiveReader(model)
    for length in (24, 32):
        ids = torch.arange(1, length + 1)[None]
        reader.nll(ids)
        assert read.pop() == ids.shape


# On the command line.


def test_comparisons_give_the_same_numbers(ropecli, corpus, llama):
    options = [
        "--data",
        corpus,
        "--max-documents",
        3,
        "--lengths",
        "32,100",
        "--methods",
        "as-is,linear,dynamic,rerope",
    ]
    losses = []
    for place, device in (([], "cpu"), (["--device-map", "auto", "--max-memory", "cpu=300KB"], "cpu,disk")):
        outcome = ropecli("compare", llama, *options, *place, "--json")
        reports = outcome.reports()
        assert {report["device"] for report in reports} == {device}
        losses.append([row["nll"] for report in reports for row in report["rows"]])
    assert losses[1] == pytest.approx(losses[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-memory", "cpu=1GB"], "--max-memory has no effect without --device-map"),
        (["--device-map", "atuo"], "--device-map is 'atuo'; expected one of auto, balanced"),
        (["--device-map", "auto", "--max-memory", "0:1GB"], "--max-memory is '0:1GB'"),
        (["--device-map", "auto", "--device", "cpu"], "exclude each other"),
        (["--load-in-8bit", "--load-in-4bit"], "exclude each other"),
    ],
)
def test_unsuitable_options_are_refused(options, message, ropecli, llama, corpus):
    outcome = ropecli("eval-ppl", llama, "--data", corpus, *options)
    assert outcome.code == 2
    assert message in outcome.err


# On GPUs.


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("method", ["none", "dynamic", "rerope"])
def test_two_gpus_give_the_losses_of_one(method, build, documents, evaluate):
    folder = build("llama", head_dim=32, num_hidden_layers=8)
    checkpoint = open_checkpoint(folder)
    size = sum(path.stat().st_size for path in checkpoint.weight_files())
    plan = make_plan(checkpoint, make_spec(method, 4.0 if method != "none" else 1.0))
    losses = []
    for options in (
        {"device": "cuda:0"},
        {"device_map": "auto", "max_memory": {0: int(0.7 * size), 1: size}},
        {"device_map": "auto", "max_memory": {0: int(0.5 * size), 1: int(0.3 * size), "cpu": int(0.3 * size)}},
    ):
        model = load_model(checkpoint, dtype="float32", **options)
        if "device_map" in options:
            assert {"cuda:0", "cuda:1"} <= set(device_names(model).split(","))
        live_patch(model, plan.positions.ropes)
        cells = evaluate(model, documents, [100, 200], follows_length=method == "dynamic")
        losses.append([cell.value for cell in cells])
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=1e-5)
