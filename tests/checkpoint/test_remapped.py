"""A relative-position method is put on a live model and taken away again, and proved before it is written."""

import dataclasses
import errno
import json
import tempfile

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from ropecli.checkpoint import attention, remapped, stock
from ropecli.checkpoint.carrier import KEY, Carrier, write_carrier
from ropecli.checkpoint.in_memory import live_patch, unpatched_after
from ropecli.checkpoint.live import rotary_tables
from ropecli.checkpoint.plan import make_plan
from ropecli.checkpoint.reading import open_checkpoint
from ropecli.checkpoint.remapped import plain_reach, prove_on_twin
from ropecli.checkpoint.stock import read_folder
from ropecli.checkpoint.twin import make_twin
from ropecli.checkpoint.writing import patch_to, with_layout
from ropecli.errors import OutputError, PatchError, ProofError
from ropecli.rope import ScalingSpec
from ropecli.scaling.registry import scaling_methods

METHODS = [method.name for method in scaling_methods().values() if method.remaps]
IDS = (torch.arange(1, 141)[None] * 37) % 512
WINDOW = 20
SLIDING = {"head_dim": 32, "sliding_window": WINDOW}


def plan(folder, method="rerope", **params):
    return make_plan(open_checkpoint(folder), ScalingSpec(method, 4.0, params))


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


@torch.no_grad()
def logits(model):
    return model(IDS, use_cache=False).logits


def test_it_is_taken_back_whole(llama):
    model = load(llama, attn_implementation="eager")
    plain = logits(model)
    with unpatched_after(model):
        live_patch(model, plan(llama).ropes)
        assert model.config._attn_implementation == "ropecli:rerope"
        assert not torch.equal(logits(model), plain)
    assert model.config._attn_implementation == "eager"
    assert not hasattr(model.config, KEY)
    assert torch.equal(logits(model), plain)


@pytest.mark.parametrize("then", ["yarn", "dual-chunk"])
def test_another_patch_takes_its_place(then, llama):
    model, afresh = load(llama), load(llama)
    for method in ("rerope", then):
        live_patch(model, plan(llama, method).ropes)
    live_patch(afresh, plan(llama, then).ropes)
    assert torch.equal(logits(model), logits(afresh))


def test_a_loaded_checkpoint_has_its_own_back_after_another(llama, patched):
    model = load(patched(llama, "rerope"))
    before = logits(model)
    with unpatched_after(model):
        live_patch(model, plan(llama, "yarn").ropes)
        assert model.config._attn_implementation == "sdpa"
        assert not torch.equal(logits(model), before)
    assert torch.equal(logits(model), before)


UNSUITABLE = {
    "mistral": (SLIDING, "sliding_window is 20"),
    "smollm3": ({"no_rope_layers": [1, 0]}, "do not turn by the rotary tables"),
}


@pytest.mark.parametrize("model_type", UNSUITABLE)
def test_a_model_that_does_not_allow_it_is_left_as_it_was(model_type, build, llama):
    settings, reason = UNSUITABLE[model_type]
    folder = build(model_type, **settings)
    model = load(folder)
    plain, table = logits(model), rotary_tables(model)[0].inv_freq
    with pytest.raises(PatchError, match=reason):
        live_patch(model, plan(folder).ropes)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(logits(model), plain)
    np.testing.assert_array_equal(rotary_tables(model)[0].inv_freq, table)


def test_plain_reach_is_where_the_first_distance_changes():
    at = np.arange(200)
    plain = at[:, None] - at[None]
    for method in METHODS:
        carrier = Carrier(method, {}, 64, 256)
        reach, distances = plain_reach(carrier, most=200), carrier.remapping().distances(at, at)
        assert 1 < reach < 200
        assert all(np.array_equal(distances[n, : n + 1], plain[n, : n + 1]) for n in range(reach))
        assert not np.array_equal(distances[reach, : reach + 1], plain[reach, : reach + 1])
        assert plain_reach(carrier, most=reach - 1) == reach - 1


def test_an_attention_that_does_something_else_is_found_out(llama, monkeypatch, tmp_path):
    """The proof compares with the model's own: scaled scores, as an architecture may want them, show."""

    def another(*arguments, **options):
        return attend(*arguments, **{**options, "scaling": 0.5 * options["scaling"]})

    attend = attention.attend
    monkeypatch.setattr(attention, "attend", another)
    with pytest.raises(PatchError, match=r"Where rerope changes nothing, the model's output differs by 0\.\d+ of the"):
        patch_to(plan(llama), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    model = load(llama)
    with pytest.raises(PatchError, match="Where rerope changes nothing"):
        live_patch(model, plan(llama).ropes)
    assert model.config._attn_implementation == "sdpa"


@torch.no_grad()
def test_a_model_with_another_head(llama, patched):
    """In memory as from a folder."""
    head = AutoModelForSequenceClassification
    plain, loaded, in_memory = (head.from_pretrained(folder) for folder in (llama, patched(llama, "rerope"), llama))
    live_patch(in_memory, plan(llama).ropes)
    states = [model.base_model(IDS, use_cache=False)[0] for model in (plain, loaded, in_memory)]
    assert not torch.allclose(states[0], states[1], atol=1e-3)
    torch.testing.assert_close(states[2], states[1], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("names", "warned"),
    [({"AutoModelForCausalLM": "own.Own"}, True), ({"AutoConfig": "own.Own"}, False), (["AutoModel"], False)],
)
def test_code_of_the_checkpoints_own_is_warned_of(names, warned, llama, edited):
    """It may run an attention of its own under the method's name."""
    source = edited(llama, auto_map=names)
    assert any("code of its own (auto_map)" in warning for warning in plan(source).writing_warnings) is warned
    assert not any("auto_map" in warning for warning in plan(source, "yarn").writing_warnings)


def test_the_model_of_the_proof_is_made_once(llama, tmp_path, monkeypatch):
    """It takes seconds where the heads are many, and gigabytes."""
    made, temporary = [], tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def make(config):
        made.append(list(temporary.iterdir()))  # a kill would leave it there
        return make_twin(config)

    monkeypatch.setattr(remapped, "make_twin", make)
    planned = with_layout(plan(llama))
    patch_to(planned, tmp_path / "out")
    assert made == [[]]


def test_a_full_disk_is_told_of(llama, tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(stock, "TemporaryDirectory", full)
    with pytest.raises(OutputError, match="temporary folder could not be written: No space left"):
        patch_to(plan(llama), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def write(folder, config, carrier):
    write_carrier(config, carrier)
    (folder / "config.json").write_text(json.dumps(config))


def test_frequencies_that_the_model_does_not_turn_by_are_found_out(llama, config_of, tmp_path, monkeypatch):
    carrier = Carrier("rerope", {"window": 32}, 64, 256)
    write(tmp_path, config_of(llama), carrier)
    assert prove_on_twin(read_folder(tmp_path), carrier) == dataclasses.replace(
        carrier, rotary_start=0, neighbours=False
    )
    monkeypatch.setattr(attention, "frequencies_of", lambda config: {"": [0.5] * 16})
    with pytest.raises(ProofError, match="rotary_emb turns by other frequencies than its config's RoPE fields say"):
        prove_on_twin(read_folder(tmp_path), carrier)


def test_a_name_that_transformers_does_not_go_by_is_found_out(llama, config_of, tmp_path):
    carrier = Carrier("rerope", {"window": 32}, 64, 256)
    write(tmp_path, config_of(llama), carrier)
    other = dataclasses.replace(carrier, method="streaming", params={})
    with pytest.raises(ProofError, match=r"does not take the attention that config\.json asks for"):
        prove_on_twin(read_folder(tmp_path), other)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_the_attention_reads_the_frequencies_that_the_model_turns_by(model_type, build):
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    settings = {
        "llama": {"head_dim": 32, "max_position_embeddings": 256, "rope_parameters": rope},
        "gemma3_text": {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]},
    }
    model = load(build(model_type, **settings[model_type]))
    known = attention.frequencies_of(model.config)
    tables = rotary_tables(model)
    assert {table.layer_type or "" for table in tables} == set(known)
    for table in tables:
        np.testing.assert_allclose(known[table.layer_type or ""], table.inv_freq, rtol=1e-5)
    remapped._check_frequencies(model)
