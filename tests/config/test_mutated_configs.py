"""Released configs with one or two changed fields: a report, a finding or one refusal; never a Python error or a
number that cannot be.

They are in shared/configs, in the repository or beside it.
"""

import contextlib
import copy
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ropecli.checkpoint import inspection
from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.patch_plan import make_plan
from ropecli.checkpoint.state import read_state
from ropecli.config.fields import section_of
from ropecli.errors import RopecliError
from ropecli.scaling.spec import make_spec

ROOT = Path(__file__).parents[2]
FOLDER = next(
    (path for path in (ROOT / "shared" / "configs", ROOT.parent / "shared" / "configs") if path.is_dir()), None
)
SEED, COUNT, BY_DEFAULT = 0, 3000, 150
FIELDS = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim", "vocab_size"),
    *("max_position_embeddings", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
    *("attention_chunk_size", "no_rope_layers", "num_kv_shared_layers", "index_topk"),
    *("sliding_window_pattern", "global_attn_every_n_layers", "kv_lora_rank", "qk_rope_head_dim", "rope_theta"),
    *("partial_rotary_factor", "original_max_position_embeddings", "rope_scaling", "rope_parameters"),
    *("rope_scaling", "rope_parameters", "max_position_embeddings", "rope_theta"),  # what users change
)
ROPE_FIELDS = ("factor", "rope_theta", "original_max_position_embeddings", "mrope_section", "rope_type", "beta_fast")
ODD = (None, "4", [4], [None], [], {}, "", True, -1, 0, 1.5, 10**7, 10**20, math.nan, math.inf)
TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "ntk", "deepseek_yarn", "yarm")
SCALINGS = (
    {"type": "yarn", "factor": 4.0},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "betafast": 32, "original_max_position_embeddings": 4096},
    {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 4096},
)
REMOVED = object()


def mutations(count: int) -> Iterator[tuple[str, dict[str, Any], list[tuple[str, Any]]]]:
    """Name, config and changes. The first ones are the same for every count."""
    assert FOLDER is not None
    released = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
    del released["expected"]
    choose = random.Random(SEED)
    for index in range(count):
        name = [*released][index % len(released)]
        config = copy.deepcopy(released[name])
        changes = [_mutate(config, choose) for _ in range(choose.choice((1, 1, 2)))]
        yield name, config, changes


def _mutate(config: dict[str, Any], choose: random.Random) -> tuple[str, Any]:
    """Change one field in place."""
    part = section_of(config)
    ropes = [part[key] for key in ("rope_scaling", "rope_parameters") if isinstance(part.get(key), dict)]
    ropes += [value for rope in ropes for value in rope.values() if isinstance(value, dict)]
    if ropes and choose.random() < 0.4:
        part = choose.choice(ropes)
        key = choose.choice([*part, *ROPE_FIELDS])
    elif choose.random() < 0.05:
        part, key = config, choose.choice(("architectures", "model_type", "text_config"))
    else:
        key = choose.choice([*(field for field in FIELDS if field in part), choose.choice(FIELDS)])
    value = choose.choice(ODD) if choose.random() < 0.2 else _other(key, part.get(key), choose)
    if value is REMOVED:
        part.pop(key, None)
    else:
        part[key] = value
    return key, "removed" if value is REMOVED else value


def _other(key: str, value: Any, choose: random.Random) -> Any:
    """A value that a user may have written."""
    if key in ("rope_type", "type"):
        return choose.choice(TYPES)
    if key in ("rope_scaling", "rope_parameters"):
        return choose.choice([*map(dict, SCALINGS), REMOVED])
    if isinstance(value, bool) or value is None:
        return choose.choice((not value, REMOVED, 4096))
    if isinstance(value, int | float):
        return choose.choice((value * 2, value // 2, value * 4, value + 1, float(value), str(value), -value, REMOVED))
    if isinstance(value, list) and value:
        return choose.choice((value[:-1], value + value[-1:], ["x", *value[1:]], value[::-1], value[0], REMOVED))
    return REMOVED


def impossible(report: dict[str, Any]) -> list[str]:
    """Numbers of a report that cannot be."""
    counts = ("pretraining_length", "context_length", "head_dim", "rotary_dim", "pairs")
    wrong = [key for key in counts if not 0 < report[key] < 1e12]
    wrong += [key for key, value in report.items() if key.startswith("kv_cache") and value and not 0 < value < 1e18]
    wrong += [f"layers {kind}" for kind in report["layers"] if kind["count"] < 1 or (kind["window"] or 1) < 1]
    return wrong + [key for key in ("rope_theta", "factor", "attention_factor") if not 0 < report[key] < 1e16]


def examine(name: str, config: dict[str, Any], changes: list[tuple[str, Any]], folder: Path) -> str:
    """`refused`, `finding` or `nothing found`; everything else fails."""
    try:
        state = read_state(Checkpoint(name, folder, config))
        report = inspection.inspect_checkpoint(state)
    except RopecliError:
        return "refused"
    assert impossible(report) == [], (name, changes)
    with contextlib.suppress(RopecliError):
        make_plan(state.checkpoint, make_spec("yarn", 4.0))
    return "finding" if report["findings"] else "nothing found"


@pytest.mark.skipif(FOLDER is None, reason="the released configs are not here")
@pytest.mark.parametrize("count", [BY_DEFAULT, pytest.param(COUNT, marks=pytest.mark.slow)])
def test_mutated_configs_are_reported_found_faulty_or_refused(count, tmp_path):
    results = [examine(*mutation, tmp_path) for mutation in mutations(count)]
    assert results.count("finding") >= count / 10
    assert results.count("refused") < count * 2 / 3
