"""The plan's counts and sizes by hand, and its peak memory against real training steps."""

import pytest
import torch
from scripts_by_path import load

from ropecli.training.memory_plan.estimate import MemoryEstimator
from ropecli.training.memory_plan.model_shape import build, kv_cache, model_shape
from ropecli.training.memory_plan.setups import best_setup, find_setups
from ropecli.training.recipe import Recipe

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
def llama3_8b(config_of):
    return config_of(
        "llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )


@pytest.fixture(scope="module")
def estimator(llama2_7b):
    return MemoryEstimator(llama2_7b)


def anatomy_of(config):
    with torch.device("meta"):
        return model_shape(build(config))


def test_parameters_of_llama_2_7b(estimator):
    layer = 4 * 4096**2 + 3 * 4096 * 11008
    assert estimator.shape.total == estimator.shape.active == 6_738_415_616
    assert estimator.shape.matmul == 32 * layer + 32000 * 4096
    assert len(estimator.shape.attention) == 32


def test_a_token_goes_through_some_experts_alone(config_of):
    """Mixtral 8x7B: 46.7 billion parameters, 12.9 billion of them active (arXiv:2401.04088, section 1)."""
    found = anatomy_of(config_of("mixtral"))
    assert found.total == 46_702_792_704
    assert found.active == 12_879_925_248


def test_kv_caches_by_hand(llama2_7b, llama3_8b, estimator, config_of):
    assert kv_cache(estimator.shape, 4096) == 2 * 2**30
    assert kv_cache(anatomy_of(llama3_8b), 131072) == 16 * 2**30
    latent = config_of("deepseek_v3")  # 512 values and 64 that rotate, a token and layer, in two bytes
    assert kv_cache(anatomy_of(latent), 1000) == (512 + 64) * 2 * 61 * 1000
    config = config_of(
        "gemma3_text", num_hidden_layers=6, num_key_value_heads=2, head_dim=32, sliding_window=128, hidden_size=64
    )
    tokens = 5 * 128 + 4096  # five layers slide, the sixth sees all
    assert kv_cache(anatomy_of(config), 4096) == 2 * 2 * 32 * 2 * tokens


def test_two_layers_of_a_kind_tell_what_all_take(config_of):
    small = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 512, "head_dim": 16, "sliding_window": 32}
    config = config_of("gemma3_text", num_hidden_layers=8, **small)
    some, every = MemoryEstimator(config), MemoryEstimator(config)
    assert [len(layers) for layers in some.fake_steps.kinds] == [7, 1]
    every.fake_steps.kinds = [[layer] for layer in range(8)]
    for asked in (recipe(), recipe(gradient_accumulation=1, offload_activations=True)):
        found, expected = (one.estimate(asked, 512, "fsdp2", 2) for one in (some, every))
        assert found.total == pytest.approx(expected.total, rel=1e-3)
        assert (found.trained, found.host) == (expected.trained, pytest.approx(expected.host, rel=1e-3))


@pytest.mark.parametrize("model_type", ["minimax", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_short_sequences_tell_what_a_long_one_takes(model_type, config_of):
    """Their layers loop over the tokens."""
    small = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 500, "head_dim": 16, "num_hidden_layers": 4}
    config = config_of(model_type, **small)
    short, whole = MemoryEstimator(config), MemoryEstimator(config)
    whole.fake_steps._short = 0
    length = 12288
    found, expected = (one.estimate(recipe(offload_activations=True), length, "one", 1) for one in (short, whole))
    assert 0 < short.fake_steps._short < length / 4
    assert found.total - found.runtime == pytest.approx(expected.total - expected.runtime, rel=1e-4)
    assert found.host == pytest.approx(expected.host, rel=1e-4)


def test_the_smallest_change_that_fits_is_found(estimator):
    found = find_setups(estimator, recipe(), 4096, 8, 80 * 10**9)
    chosen = best_setup(found)
    assert (chosen.engine, chosen.changes) == ("fsdp2", {})
    assert chosen.estimate.total <= 80 * 10**9
    assert not any(one.fits for one in found if one.recipe.adapter == "none" and one.engine == "ddp")
    assert best_setup(find_setups(estimator, recipe(adapter="qlora"), 4096, 1, 3 * 10**9)) is None


def test_auto_recomputes_layers_only_where_a_step_would_not_fit(estimator):
    asked = recipe()
    assert asked.gradient_checkpointing == "auto"
    without = estimator.estimate(recipe(gradient_checkpointing=False), 4096, "fsdp2", 8).total
    for memory, checkpointing in ((1.2 * without, False), (1.05 * without, True)):
        [chosen] = [one for one in find_setups(estimator, asked, 4096, 8, int(memory))[:2] if one.engine == "fsdp2"]
        assert (chosen.recipe.gradient_checkpointing, chosen.changes) == (checkpointing, {})
    resolved = estimator.resolve_checkpointing(recipe(offload_activations=True), 4096, "fsdp2", 8, 10**15)
    assert resolved.gradient_checkpointing is True


def test_main_memory_by_hand(estimator):
    total = estimator.shape.total
    found = find_setups(estimator, recipe(), 4096, 16, 80 * 10**9, host=64 * 10**9)
    ddp, fsdp2 = ([one for one in found if one.engine == engine] for engine in ("ddp", "fsdp2"))
    assert ddp[0].host.loading == 8 * 4 * total  # a machine has eight of the GPUs
    assert ddp[0].host.saving == (4 + 2) * total  # in float32, then as the bfloat16 of the source
    assert fsdp2[0].host.loading == 4 * 32000 * 4096 // 2  # an embedding, of which this machine reads half
    assert fsdp2[0].host.saving == 5 * 10**9
    assert (ddp[0].fits, fsdp2[0].fits) == (False, True)
    offloaded = find_setups(estimator, recipe(offload_activations=True), 4096, 16, 80 * 10**9)[1]
    assert offloaded.host.training == 8 * offloaded.estimate.host > 0


@pytest.mark.parametrize(
    ("engine", "keys", "settings", "told"),
    [
        ("ulysses", {"sequences": "packed"}, {}, "packed"),
        ("ulysses", {}, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "frequencies"),
        ("ulysses", {"adapter": "qlora"}, {}, "ZeRO-3"),
        ("fsdp2", {"adapter": "qlora"}, {}, "FSDP2"),
        ("fsdp2", {"optimizer": "adamw-8bit"}, {}, "adamw-8bit"),
        ("ulysses", {"optimizer": "adamw-8bit"}, {}, None),
    ],
)
def test_nothing_is_advised_that_finetune_refuses(engine, keys, settings, told, config_of):
    small = {"hidden_size": 96, "intermediate_size": 96, "vocab_size": 512, "num_hidden_layers": 2}
    config = config_of("llama", **{"num_attention_heads": 4, **small, **settings})
    found = find_setups(MemoryEstimator(config), recipe(**keys), 1024, 2, 10**12)
    [refused, *_] = [one.refused for one in found if one.engine == engine]
    assert told in refused if told else refused == ""


_SMALL = {
    "llama": {"type": "llama", "vocab": 512, "layers": 3, "length": 512, "recipe": {}},
    "bf16": {"type": "qwen2", "vocab": 2048, "layers": 2, "length": 512, "recipe": {"mixed_precision": "bf16"}},
    "capped": {"type": "gemma2", "vocab": 4096, "layers": 2, "length": 256, "recipe": {}},
    "eager": {"type": "llama", "vocab": 512, "layers": 2, "length": 512, "recipe": {"attn": "eager"}},
    "lora by document": {
        "type": "llama",
        "vocab": 4096,
        "layers": 2,
        "length": 512,
        "recipe": {"adapter": "lora", "mixed_precision": "bf16", "loss_weighting": "documents"},
        "half_base": True,
    },
    "rerope, no checkpointing": {
        "type": "llama",
        "vocab": 512,
        "layers": 2,
        "length": 1024,
        "recipe": {"mixed_precision": "bf16", "gradient_checkpointing": False},
        "more": bench.REROPE,
    },
}


@pytest.mark.parametrize("name", _SMALL)
def test_a_real_step_takes_what_was_foreseen(name):
    case = _SMALL[name]
    assert bench.predict(case) == pytest.approx(bench.allocated(case), rel=WITHIN)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama, bf16", "llama, 131072 words", "llama, LoRA", "gemma2, capped logits"])
def test_a_real_step_on_a_gpu_takes_what_was_foreseen(name):
    case = bench.CASES[name]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    bench.train(case, "cuda")
    measured = torch.cuda.max_memory_allocated() - before
    assert bench.predict(case, gpu=True) == pytest.approx(measured, rel=WITHIN_ON_GPU)
