"""MLPs in tiles: the same loss and gradients, and only where each token is computed alone."""

import pytest
import torch

from ropecli.errors import RecipeError
from ropecli.training import tiled_mlp
from ropecli.training.loss import NextTokenLoss, enable_checkpointing
from ropecli.training.tiled_mlp import find_tileable, tile_mlps

TOKENS = 150
"""More than two tiles of 64 tokens, and the last one is not full."""


@pytest.fixture
def model_of(build):
    """model_of("llama", key=value, ...) -> a live two-layer model, 64 values wide."""
    from transformers import AutoModelForCausalLM

    return lambda model_type, **settings: AutoModelForCausalLM.from_pretrained(build(model_type, **settings))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("model_type", "settings"), [("llama", {}), ("gemma2", {}), ("mixtral", {"num_local_experts": 2})]
)
def test_loss_and_gradients_are_those_of_whole_sequences(model_of, model_type, settings, checkpointing):
    model = model_of(model_type, head_dim=32, **settings).train()
    ids = torch.randint(model.config.vocab_size, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    rows = []
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda module, given, output: rows.append(given[0].shape[1]))
    inner = model.model.layers[0].mlp.experts if model_type == "mixtral" else model.model.layers[0].mlp.down_proj
    inner.register_forward_hook(lambda module, given, output: rows.append(given[0].shape[-2]))

    def gradients():
        model.zero_grad()
        loss = NextTokenLoss(model)(ids[:, :-1], ids[:, 1:])
        loss.backward()
        return loss.detach(), {name: weight.grad.clone() for name, weight in model.named_parameters()}

    expected, whole = gradients()
    tile_mlps(model)
    if checkpointing:
        enable_checkpointing(model)
    rows.clear()
    actual, tiled = gradients()
    assert min(rows) < TOKENS / 2
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
    for name, gradient in whole.items():
        torch.testing.assert_close(tiled[name], gradient, rtol=1e-4, atol=1e-5 * gradient.abs().max().item())


def test_recipe_key_gives_the_losses_of_whole_sequences(tune, patched_llama, metrics, tmp_path, monkeypatch):
    tiles, in_tiles = [], tiled_mlp._in_tiles

    def counted(forward, tokens, most, hidden):
        tiles.append(hidden.shape[1] / tokens)
        return in_tiles(forward, tokens, most, hidden)

    monkeypatch.setattr(tiled_mlp, "_in_tiles", counted)
    runs = [tune(patched_llama, tmp_path / str(tiled), length=96, steps=3, tiled_mlp=tiled) for tiled in (False, True)]
    assert set(tiles) == {96 / 64}
    losses = [[line["loss"] for line in metrics(run) if "loss" in line] for run in runs]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_only_parts_that_treat_each_token_alone_are_tiled(model_of):
    """Attention needs more than hidden states; the state of Qwen3-Next's linear attention runs along the sequence."""
    layers = {"layer_types": ["linear_attention", "full_attention"]}
    hybrid = model_of("qwen3_next", head_dim=32, num_experts=2, num_experts_per_tok=1, **layers)
    assert {name for name, _ in find_tileable(hybrid)} == {"mlp"}
    with pytest.raises(RecipeError, match="no MLP in BloomForCausalLM"):
        tile_mlps(model_of("bloom", n_head=4))  # its MLP adds the residual
