"""Models spread over devices by Accelerate: over CPU and disk here, over two GPUs where there are two."""

import pytest
import torch
from tiny_settings import EXPERTS, LATENT, ONE_OF_EACH

from ropecli.attention import load_model
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.evaluation.perplexity import evaluate_perplexity
from ropecli.live.devices import device_names, input_device

TYPES = {
    "llama": {"head_dim": 32},
    "tied weights": {"model_type": "qwen2", "tie_word_embeddings": True},
    "a soft cap": {"model_type": "gemma2", "head_dim": 32, **ONE_OF_EACH},
    "fused experts": {"model_type": "mixtral", "head_dim": 32, **EXPERTS},
    "latent attention": {"model_type": "deepseek_v3", **LATENT},
    "dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        "head_dim": 32,
    },
}


def spread(folder, share=0.5):
    """The model with this share of its weights in memory, the rest on disk."""
    checkpoint = open_checkpoint(folder)
    size = sum(path.stat().st_size for path in checkpoint.weight_files())
    return load_model(checkpoint, device="cpu", device_map="auto", max_memory={"cpu": int(share * size)})


def offloaded(model):
    return [name for name, parameter in model.named_parameters() if parameter.is_meta]


@pytest.mark.parametrize("settings", TYPES.values(), ids=TYPES.keys())
@pytest.mark.parametrize("protocol", ["prefix", "sliding"])
def test_losses_equal_those_of_one_device(settings, protocol, build, loaded, documents):
    settings = dict(settings)
    folder = build(settings.pop("model_type", "llama"), **settings)
    model = spread(folder)
    assert offloaded(model)
    assert input_device(model) == torch.device("cpu")
    assert device_names(model) in ("cpu,disk", "disk")
    measured = [evaluate_perplexity(one, documents, [32, 100], protocol=protocol) for one in (loaded(folder), model)]
    for expected, found in zip(*measured, strict=True):
        assert found.nll == pytest.approx(expected.nll, rel=1e-6)
