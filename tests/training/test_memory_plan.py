"""The plan's counts and sizes by hand, and its peak memory against real training steps."""

import json
from types import SimpleNamespace

import pytest
import torch
from scripts_by_path import load

from ropecli.config.layers import kv_cache_bytes
from ropecli.config.settings import read_settings
from ropecli.live.skeleton import build_model
from ropecli.training.launch import Launch
from ropecli.training.memory_plan.estimate import MemoryEstimator, model_shape
from ropecli.training.memory_plan.fake_step import LiveBytes, _shared
from ropecli.training.memory_plan.setups import best_setup, find_setups
from ropecli.training.recipe_schema import Recipe

bench = load("bench_parts/plan")
WITHIN = 0.05
WITHIN_ON_GPU = 0.2


def recipe(**keys) -> Recipe:
    return Recipe(data="none is read", **keys)


@pytest.fixture(scope="module")
def config_of():
    """config_of("llama", key=value, ...) -> a config of transformers."""
    from transformers import CONFIG_MAPPING

    return lambda model_type, **settings: CONFIG_MAPPING[model_type](**settings)


@pytest.fixture(scope="module")
def llama2_7b(config_of):
    return config_of("llama", vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32)


@pytest.fixture(scope="module")
def estimator(llama2_7b):
    return MemoryEstimator(llama2_7b)


def shape_of(config):
    return model_shape(build_model(config))


def kv_cache(config, length):
    section = json.loads(config.to_json_string(use_diff=False))
    settings = read_settings(section)
    return kv_cache_bytes(section, settings.family, settings.layers, length)


def test_parameters_by_hand(estimator, config_of):
    layer = 4 * 4096**2 + 3 * 4096 * 11008
    assert estimator.shape.total == estimator.shape.active == 6_738_415_616
    assert estimator.shape.matmul == 32 * layer + 32000 * 4096
    assert len(estimator.shape.attention) == 32
    mixtral = shape_of(config_of("mixtral"))  # 8x7B, with 12.9 billion active (arXiv:2401.04088, section 1)
    assert (mixtral.total, mixtral.active) == (46_702_792_704, 12_879_925_248)


def test_kv_caches_by_hand(llama2_7b, config_of):
    assert kv_cache(llama2_7b, 4096) == 2 * 2**30
    latent = config_of("deepseek_v3")  # 512 values and 64 that rotate, a token and layer, in two bytes
    assert kv_cache(latent, 1000) == (512 + 64) * 2 * 61 * 1000
    config = config_of(
        "gemma3_text", num_hidden_layers=6, num_key_value_heads=2, head_dim=32, sliding_window=128, hidden_size=64
    )
    tokens = 5 * 127 + 4096  # five layers slide, the sixth sees all
    assert kv_cache(config, 4096) == 2 * 2 * 32 * 2 * tokens


@pytest.mark.transformers("5.23", "with 5.18 offloaded activations are counted too low")
def test_memory_of_all_layers_follows_from_one_of_each_kind(config_of):
    small = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 512, "head_dim": 16, "sliding_window": 32}
    config = config_of("gemma3_text", num_hidden_layers=8, **small)
    some, every = MemoryEstimator(config), MemoryEstimator(config)
    assert some.fake_steps.others == [6, 0]
    every.fake_steps.config, every.fake_steps.others = config, [0] * 8
    keys = {"gradient_accumulation": 1, "offload_activations": True}
    actual, expected = (estimator.estimate(recipe(**keys), 512, Launch("fsdp2", 2)) for estimator in (some, every))
    assert actual.total == pytest.approx(expected.total, rel=1e-3)
    assert (actual.trained, actual.host) == (expected.trained, pytest.approx(expected.host, rel=1e-3))


def test_memory_of_a_long_sequence_follows_from_short_ones(config_of):
    """Where layers loop over the tokens, steps of 2,048 and 4,096 tokens are run. Up to 8,192, all tokens are."""
    small = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 500, "head_dim": 16, "num_hidden_layers": 4}
    config = config_of("minimax", **small)
    short, whole = MemoryEstimator(config), MemoryEstimator(config)
    whole.fake_steps.loops = False
    actual, expected = (each.estimate(recipe(offload_activations=True), 12288) for each in (short, whole))
    assert short.fake_steps.loops
    assert actual.total - actual.runtime == pytest.approx(expected.total - expected.runtime, rel=1e-4)
    assert actual.host == pytest.approx(expected.host, rel=1e-4)


def test_setup_with_the_fewest_changes_that_fits_is_chosen(estimator):
    setups = find_setups(estimator, recipe(), 4096, 8, 80 * 10**9)
    chosen = best_setup(setups)
    assert (chosen.launch.engine, chosen.changes) == ("fsdp2", {})
    assert chosen.estimate.total <= 80 * 10**9
    assert not any(setup.fits for setup in setups if setup.recipe.adapter == "none" and setup.launch.engine == "ddp")
    assert best_setup(find_setups(estimator, recipe(adapter="qlora"), 4096, 1, 3 * 10**9)) is None


def test_auto_checkpoints_only_if_a_step_would_not_fit(estimator):
    without = estimator.estimate(recipe(gradient_checkpointing=False), 4096, Launch("fsdp2", 8)).total
    for memory, checkpointing in ((1.2 * without, False), (1.05 * without, True)):
        chosen = find_setups(estimator, recipe(), 4096, 8, int(memory))[1]
        assert (chosen.recipe.gradient_checkpointing, chosen.changes) == (checkpointing, {})
    resolved = estimator.resolve_checkpointing(recipe(offload_activations=True), 4096, Launch("fsdp2", 8), 10**15)
    assert resolved.gradient_checkpointing is True


def test_setups_that_finetune_refuses_are_not_advised(config_of):
    small = {"hidden_size": 96, "intermediate_size": 96, "vocab_size": 512, "num_hidden_layers": 2}
    estimator = MemoryEstimator(config_of("llama", num_attention_heads=4, **small))
    keys = {"loss": "longce", "optimizer": "adamw-8bit"}
    _, fsdp2, shared, *_ = find_setups(estimator, recipe(**keys), 1024, 2, 10**12)
    assert "adamw-8bit" in fsdp2.refused
    assert "adamw-8bit" in shared.refused


def test_main_memory_by_hand(estimator):
    total = estimator.shape.total
    ddp, fsdp2, *_ = find_setups(estimator, recipe(), 4096, 16, 80 * 10**9, host=64 * 10**9)
    assert ddp.host == 8 * 4 * total  # a machine has eight of the GPUs
    assert fsdp2.host == 4 * 32000 * 4096 // 2  # an embedding, of which this machine reads half
    assert (ddp.fits, fsdp2.fits) == (False, True)
    offloaded = find_setups(estimator, recipe(offload_activations=True), 4096, 16, 80 * 10**9)[1]
    assert offloaded.host == 8 * offloaded.estimate.host > 0


def case_of(model_type, vocabulary, layers, length, **keys):
    return {"type": model_type, "vocab": vocabulary, "layers": layers, "length": length, "recipe": keys}


BF16 = {"mixed_precision": "bf16"}
LORA = {"adapter": "lora", **BF16, "loss_weighting": "documents"}
SMALL = {
    "bf16": case_of("qwen2", 2048, 2, 512, **BF16),
    "capped": case_of("gemma2", 4096, 2, 256),
    "eager": case_of("llama", 512, 2, 512, attn="eager"),
    "lora by document": {**case_of("llama", 4096, 2, 512, **LORA), "half_base": True},
    "rerope": {**case_of("llama", 512, 2, 1024, gradient_checkpointing=False, **BF16), "more": bench.REROPE},
}


@pytest.mark.parametrize("name", SMALL)
def test_estimate_is_that_of_a_real_step(name):
    case = SMALL[name]
    assert bench.predict(case) == pytest.approx(bench.allocated(case), rel=WITHIN)


@pytest.mark.parametrize("keys", [8, 4])
def test_shared_attention_takes_the_memory_of_ringmasters(keys):
    """ringmaster's own code, as one of four processes that do not communicate."""
    ringmaster = pytest.importorskip("ringmaster")
    from ringmaster.strategies.ulysses import make_ulysses_attention
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    module = SimpleNamespace(is_causal=True, sliding_window=None, num_key_value_groups=8 // keys)

    def peaks(attend):
        """Most bytes in the forward and in the backward pass."""
        heads = [torch.zeros(2, count, 128, 32, requires_grad=True) for count in (8, keys, keys)]
        with LiveBytes(heads) as counter:
            counter.owner = "forward"
            output = attend(*heads)
            counter.owner = "backward"
            torch.autograd.grad(output, heads, torch.zeros_like(output))
        return [counter.peaks[phase].total() for phase in ("forward", "backward")]

    distributed.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    try:
        ringmaster.setup(ringmaster.RingmasterConfig(4, ringmaster.Backend.ULYSSES), device_type="cpu")
        actual = peaks(lambda *heads: make_ulysses_attention("sdpa")(module, *heads, None)[0])
    finally:
        ringmaster.teardown()
        distributed.destroy_process_group()
    counted = peaks(lambda *heads: _shared(*heads, 4))
    assert counted == pytest.approx(actual, rel=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama, bf16", "llama, 131072 words", "llama, LoRA", "gemma2, capped logits"])
def test_estimate_is_that_of_a_real_step_on_a_gpu(name):
    case = bench.CASES[name]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    bench.train(case, "cuda")
    measured = torch.cuda.max_memory_allocated() - before
    assert bench.predict(case, gpu=True) == pytest.approx(measured, rel=WITHIN_ON_GPU)
