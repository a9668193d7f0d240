"""A config file for axolotl, checked by running release 0.19.0 (utils/schemas, loaders/{model,utils}.py).

- It loads config.json by `AutoConfig`, so the patch applies. `base_model_config` loads another config instead;
  `model_config` (also spelled `overrides_of_model_config`) overrides it. `rope_scaling` is an error.
- A `sequence_len` above max_position_embeddings raises that field in the model and in what it saves.
- Rows longer than `sequence_len` are dropped, except of the type completion, which splits them.
- It saves by `save_pretrained`.
"""

from typing import Any

from ropecli.engines.checkpoint_positions import CheckpointPositions
from ropecli.engines.engine_table import SAVED_BY_TRANSFORMERS, Case, EngineTable, as_yaml


def _overrides(p: CheckpointPositions) -> dict[str, Any]:
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


ENGINE = EngineTable(
    title="axolotl 0.19.0",
    command=lambda p: ("axolotl", "train"),
    overrides=_overrides,
    file_name="axolotl.yaml",
    file_text=as_yaml,
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
        SAVED_BY_TRANSFORMERS,
    ),
)
