"""Checkpoints that come quantized, and quantizing while loading.

tests/training/test_bitsandbytes_environment.py installs the packages that are not here.
"""

import importlib.util

import pytest
import torch
from safetensors.torch import load_file, save_file

from ropecli.attention import load_model
from ropecli.attention.patching import live_patch
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.checkpoint.patch_plan import make_plan
from ropecli.errors import CheckpointError
from ropecli.scaling.spec import make_spec

HERE = {name: importlib.util.find_spec(name) is not None for name in ("bitsandbytes", "compressed_tensors")}
BLOCK = 32
FP8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic", "fmt": "e4m3"}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT8}},
}


@pytest.fixture(scope="module")
def llama(build):
    return build("llama", head_dim=32, hidden_size=128, intermediate_size=192)


@pytest.fixture
def quantized(llama, edited):
    """quantized(config, weight -> tensors by ending) -> a copy with quantized projections, the rest in bfloat16."""

    def make(config, tensors_of):
        folder = edited(llama, quantization_config=config)
        weights = {}
        for name, value in load_file(folder / "model.safetensors").items():
            new = tensors_of(value) if name.endswith("_proj.weight") else {"": value.bfloat16()}
            weights |= {name + ending: tensor for ending, tensor in new.items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return folder

    return make


def in_fp8(weight):
    """Blocks of e4m3 numbers, and what each block is multiplied by."""
    rows, columns = (size // BLOCK for size in weight.shape)
    blocks = weight.reshape(rows, BLOCK, columns, BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)) / 448
    values = (blocks / scale[:, None, :, None]).reshape(weight.shape).to(torch.float8_e4m3fn)
    return {"": values, "_scale_inv": scale}


def packed(weight):
    from compressed_tensors.compressors import pack_to_int32

    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    values = (weight / scale).round().to(torch.int8)
    return {"_packed": pack_to_int32(values, 8), "_scale": scale, "_shape": torch.tensor(weight.shape)}


@pytest.fixture
def nll(documents, evaluate):
    return lambda model: evaluate(model, documents, [64])[0].value


@pytest.mark.transformers("5.23", "older releases import Triton for FP8, also on a CPU")
def test_fp8_is_read_as_bfloat16_on_a_cpu(quantized, llama, nll):
    checkpoint = open_checkpoint(quantized(FP8, in_fp8))
    model = load_model(checkpoint, device="cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    exact = nll(load_model(open_checkpoint(llama), device="cpu"))
    assert 1e-6 < abs(nll(model) - exact) < 0.3
    with pytest.raises(CheckpointError, match="On a CPU it needs dtype bfloat16 or auto"):
        load_model(checkpoint, device="cpu", dtype="float32")


@pytest.mark.parametrize(
    ("method", "bits", "message"),
    [
        ("modelopt", None, r"quantized with 'modelopt', which transformers does not support"),
        ("gptq", 8, r"already quantized with gptq. Remove --load-in-8bit"),
    ],
)
def test_quantized_weights_that_cannot_be_loaded_are_refused(method, bits, message, edited, llama):
    folder = edited(llama, quantization_config={"quant_method": method})
    with pytest.raises(CheckpointError, match=message):
        load_model(open_checkpoint(folder), device="cpu", **({"bits": bits} if bits else {}))


@pytest.mark.skipif(not HERE["bitsandbytes"], reason="needs bitsandbytes")
@pytest.mark.parametrize("bits", [8, 4])
def test_weights_are_quantized_while_loading(bits, llama, nll):
    checkpoint = open_checkpoint(llama)
    model = load_model(checkpoint, device="cpu", bits=bits)
    kinds = {
        type(model.get_submodule(f"model.layers.0.{name}")).__name__ for name in ("self_attn.q_proj", "mlp.up_proj")
    }
    assert kinds == {"Linear8bitLt" if bits == 8 else "Linear4bit"}
    exact = load_model(checkpoint, device="cpu")
    assert 1e-6 < abs(nll(model) - nll(exact)) < 0.5
    # proved on the model although its matrix products round
    live_patch(model, make_plan(checkpoint, make_spec("rerope", 4.0)).positions.ropes)
    assert nll(model) > 0


@pytest.mark.skipif(not HERE["bitsandbytes"], reason="needs bitsandbytes")
@pytest.mark.parametrize("bits", [8, 4])
def test_a_method_is_measured_on_quantized_weights(bits, ropecli, llama, corpus):
    options = ["--data", corpus, "--methods", "yarn", "--factors", 2, "--max-documents", 8, "--lengths", 64]
    outcome = ropecli("eval-ppl", llama, *options, f"--load-in-{bits}bit", "--json")
    assert outcome.report()["settings"]["bits"] == bits


@pytest.mark.skipif(not HERE["compressed_tensors"], reason="needs compressed-tensors")
def test_compressed_tensors_are_read_by_their_library(quantized, llama, nll):
    checkpoint = open_checkpoint(quantized(PACKED, packed))
    exact = nll(load_model(open_checkpoint(llama), device="cpu"))
    assert 1e-6 < abs(nll(load_model(checkpoint, device="cpu")) - exact) < 0.05
    with pytest.raises(CheckpointError, match=r"compressed-tensors, which needs one device\. Remove --device-map"):
        load_model(checkpoint, device_map="auto", max_memory={"cpu": 100_000})
