"""Config files for TRL's SFTTrainer and for axolotl. Both load the folder with transformers and save it by
`save_pretrained`, so the patch applies.

TRL, checked by running release 1.16.0 (scripts/sft.py, trainer/sft_*.py):
- `model_init_kwargs` overrides config.json.
- `max_length` defaults to 1,024 tokens; the rest of each document is dropped silently. With packing, `bfd` drops what
  exceeds it too; `bfd_split` keeps it.
- Packing passes position_ids that start again with each document and no mask: documents do not see each other. With
  `wrapped` they do.

axolotl, checked by running release 0.19.0 (utils/schemas, loaders/{model,utils}.py):
- `base_model_config` loads another config; `model_config` (also spelled `overrides_of_model_config`) overrides it.
  `rope_scaling` is an error.
- A `sequence_len` above max_position_embeddings raises that field in the model and in what it saves.
- Rows longer than `sequence_len` are dropped, except of the type completion, which splits them.
"""

from typing import Any

import yaml

from ropecli.engines.engine_table import Case, EngineInput, EngineTable

_SAVED_BY_TRANSFORMERS = (
    "The trained model keeps the scaling, but only in rope_parameters, and has no ropecli.yaml: `ropecli inspect "
    "OUTPUT` prints the command that also writes the fields of older readers. Merge adapters with `ropecli merge`."
)


def _as_yaml(overrides: dict[str, Any]) -> str:
    return yaml.safe_dump(overrides, sort_keys=False)


def _trl_overrides(p: EngineInput) -> dict[str, Any]:
    return {
        "model_name_or_path": p.checkpoint,
        **({} if p.revision is None else {"model_revision": p.revision}),
        "dataset_name": "DATASET",
        "max_length": p.length,
        "packing": True,
        "packing_strategy": "bfd_split",
        "attn_implementation": "flash_attention_2",
        "per_device_train_batch_size": 1,
        "gradient_checkpointing": True,
        "bf16": True,
        "output_dir": "OUTPUT",
    }


TRL = EngineTable(
    title="TRL 1.16.0",
    command=lambda p: ("trl", "sft", "--config"),
    overrides=_trl_overrides,
    file_name="trl.yaml",
    file_text=_as_yaml,
    trains=True,
    notes=(
        "Replace DATASET by a Hub id or a folder, with a column of text or messages, and OUTPUT by a folder.",
        (
            "Do not set rope_parameters, rope_scaling or max_position_embeddings in model_init_kwargs: they replace "
            "what config.json has."
        ),
        (
            "Keep max_length: TRL's default is 1,024 tokens. attn_implementation sdpa works too, but its mask takes "
            "max_length² bytes."
        ),
        _SAVED_BY_TRANSFORMERS,
    ),
)


def _axolotl_overrides(p: EngineInput) -> dict[str, Any]:
    return {
        "base_model": p.checkpoint,
        **({} if p.revision is None else {"model_revision": p.revision}),
        "datasets": [{"path": "DATASET", "type": "completion"}],
        "sequence_len": p.length,
        "sample_packing": True,
        "attn_implementation": "flash_attention_2",
        "micro_batch_size": 1,
        "gradient_checkpointing": True,
        "bf16": True,
        "learning_rate": 2e-5,
        "output_dir": "OUTPUT",
    }


AXOLOTL = EngineTable(
    title="axolotl 0.19.0",
    command=lambda p: ("axolotl", "train"),
    overrides=_axolotl_overrides,
    file_name="axolotl.yaml",
    file_text=_as_yaml,
    trains=True,
    refused=(
        Case(
            lambda p: p.rope_type == "dynamic",
            "it raises max_position_embeddings to {p.length} tokens, and dynamic scales only beyond that field. Train "
            "with TRL or `ropecli finetune`, or patch with ntk.",
        ),
    ),
    notes=(
        (
            "Replace DATASET by a Hub id or a file, and OUTPUT by a folder. For conversations, set type: "
            "chat_template; axolotl drops those longer than sequence_len."
        ),
        (
            "Do not set base_model_config or model_config (overrides_of_model_config): they replace what config.json "
            "has. A larger sequence_len raises max_position_embeddings without changing the scaling."
        ),
        _SAVED_BY_TRANSFORMERS,
    ),
)
