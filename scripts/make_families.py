"""Writes ropecli/config/families.json: the default of each RoPE key for every language-model type in transformers.

With --check, writes nothing and exits with status 1 if the file differs.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import coverage

_COUNTS = ("num_hidden_layers", "num_key_value_heads")
FILE = Path(__file__).parents[1] / "ropecli" / "config" / "families.json"


def make_table() -> dict[str, dict[str, Any]]:
    """One entry per type and per type of a text part; {"rotary": false} if no layer uses RoPE.

    new: transformers 4.57 does not have the type. Types that the file does not list yet are new.
    """
    before = json.loads(FILE.read_text(encoding="utf-8"))
    table: dict[str, dict[str, Any]] = {}
    for model_type in coverage.all_types():
        try:
            config = coverage.config_of(model_type)
        except (ValueError, AttributeError):  # part of a larger model, not a model by itself
            continue
        text = coverage.text_section(config)
        entry = _describe(text) if _is_rotary(config) and hasattr(text, "rope_parameters") else {"rotary": False}
        entry |= _patterns(text)
        if text is not config:
            table.setdefault(text.model_type, entry)
            entry = {"text_type": text.model_type} | ({"reads_top_level": True} if _reads_top_level(model_type) else {})
        table[model_type] = entry
    for name, entry in table.items():
        if entry.get("rotary", True) and "text_type" not in entry and before.get(name, {"new": True}).get("new"):
            entry["new"] = True
    return table


def _is_rotary(config: Any) -> bool:
    """Return whether the model that transformers builds from the config has rotary tables."""
    from torch import device

    from ropecli.errors import CheckpointError, PatchError
    from ropecli.live.rotary import rotary_tables
    from ropecli.live.stock_transformers import auto_class_of

    try:
        with device("meta"):
            return bool(rotary_tables(auto_class_of(config).from_config(config)))
    except PatchError:
        return False
    except (CheckpointError, ImportError, AttributeError, ValueError):  # needs another library or an enclosing model
        return bool(getattr(coverage.text_section(config), "rope_parameters", None))


def _reads_top_level(model_type: str) -> bool:
    """Return whether a config without text_config takes the fields of its language model from the top level."""
    try:
        config = type(coverage.config_of(model_type))(max_position_embeddings=12345)
    except Exception:  # no such field, or text_config is required
        return False
    return getattr(coverage.text_section(config), "max_position_embeddings", None) == 12345


def _describe(text: Any) -> dict[str, Any]:
    parameters = text.rope_parameters
    if any(isinstance(value, dict) for value in parameters.values()):
        layers = {label: _defaults(value) for label, value in parameters.items() if value}
        for label, defaults in layers.items():
            defaults |= {
                key: kind for key, kind in parameters[label].items() if key == "rope_type" and kind != "default"
            }
        for label, width in _differing_heads(text, list(layers)).items():
            layers[label]["head_dim"] = width
        entry: dict[str, Any] = {"layers": layers}
    else:
        entry = _defaults(parameters)
    head_dim = _fixed_head_dim(type(text))
    sizes = () if head_dim else ("hidden_size", "num_attention_heads")
    fixed = {
        **{key: value for key in sizes if isinstance(value := _own(text, key), int)},
        **{key: value for key in _COUNTS if isinstance(value := getattr(type(text), key, None), int)},
        "head_dim": head_dim,
        "null_head_dim": not text.is_heterogeneous and getattr(type(text)(), "head_dim", 0) is None,
        "max_position_embeddings": getattr(text, "max_position_embeddings", None),
        "names": _names(text),
        "rotates_only_in": _rotates_only_in(text),
        "scaled": parameters.get("rope_type", "default") != "default",
    }
    return {**entry, **{key: value for key, value in fixed.items() if value}}


def _rotates_only_in(text: Any) -> str | None:
    """The only layer type that rotates by default, if the config has a flag or a base for each layer."""
    rotates = getattr(text, "no_rope_layers", None) or getattr(text, "layer_rope_theta", None) or ()
    layers = list(zip(rotates, text.layer_types, strict=True)) if rotates else []
    rotating, still = ({label for rotate, label in layers if bool(rotate) is wanted} for wanted in (True, False))
    return rotating.pop() if len(rotating) == 1 and still and not rotating & still else None


def _patterns(text: Any) -> dict[str, Any]:
    """One period of the default layer_types, and of whether each layer rotates."""
    rotates = getattr(text, "no_rope_layers", None) or getattr(text, "layer_rope_theta", None) or ()
    found = {"pattern": getattr(text, "layer_types", None) or (), "rotates": [int(bool(value)) for value in rotates]}
    usual = {"full_attention", 1}
    periods = {"pattern": _period(found["pattern"], ""), "rotates": _period(found["rotates"], 1)}
    return {key: period for key, period in periods.items() if not usual >= {*found[key]}}


def _period(values: list[Any], unknown: Any) -> list[Any]:
    """The shortest list that repeats at least twice to `values`; [unknown] if there is none."""
    for length in range(1, len(values) // 2 + 1):
        if all(value == values[at % length] for at, value in enumerate(values)):
            return values[:length]
    return [unknown]


def _own(text: Any, key: str) -> Any:
    """The value of all layers; None if layers differ."""
    return None if text.is_heterogeneous else getattr(text, key, None)


def _names(text: Any) -> dict[str, list[str]]:
    """Both names of each key that the class saves under another name; first the one that wins if both are present.

    transformers first sets the declared attributes, then the rest in file order, which is sorted on save.
    """
    found = {}
    for key in ("max_position_embeddings", "head_dim", "hidden_size", "num_attention_heads"):
        if saved := text.attribute_map.get(key):
            values = dict(zip(sorted((key, saved)), (128, 256), strict=True))
            taken = getattr(coverage.config_of(text.model_type, **values), key)
            found[key] = sorted(values, key=lambda name: values[name] != taken)
    return found


def _defaults(parameters: dict[str, Any]) -> dict[str, Any]:
    return {key: parameters[key] for key in ("rope_theta", "partial_rotary_factor") if key in parameters}


def _differing_heads(text: Any, labels: list[str]) -> dict[str, int]:
    """head_dim by layer type, if it differs between layer types."""
    if not text.is_heterogeneous:
        return {}
    try:
        heads = {label: text.per_layer_config[label].head_dim for label in labels}
    except ValueError:  # layers of one type differ in something else
        return {}
    return heads if len(set(heads.values())) > 1 else {}


def _fixed_head_dim(config_class: type) -> int | None:
    """The default head_dim of the class, if it does not depend on hidden size and number of heads."""
    found = []
    for heads in (4, 8):
        try:
            found.append(config_class(hidden_size=512, num_attention_heads=heads, num_key_value_heads=4).head_dim)
        except Exception:  # these numbers do not fit, or head_dim differs between layers
            return None
    return found[0] if found[0] == found[1] else None


def main() -> None:
    table = make_table()
    lines = [f"{json.dumps(name)}: {json.dumps(entry, sort_keys=True)}" for name, entry in sorted(table.items())]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    if "--check" in sys.argv:
        sys.exit(FILE.read_text(encoding="utf-8") != text)
    FILE.write_text(text, encoding="utf-8")
    print(f"{len(table)} types, {sum(entry.get('rotary', True) for entry in table.values())} rotary: {FILE.name}")


if __name__ == "__main__":
    main()
