"""A config file for TRL's SFTTrainer, checked by running release 1.16.0 (scripts/sft.py, trainer/sft_*.py).

- It loads the folder by `from_pretrained`, so the patch applies. `model_init_kwargs` overrides config.json.
- `max_length` defaults to 1,024 tokens; the rest of each document is dropped silently. With packing, `bfd` drops what
  exceeds it too; `bfd_split` keeps it.
- Packing passes position_ids that start again with each document and no mask: documents do not see each other. With
  `wrapped` they do.
- It saves by `save_pretrained`.
"""

from typing import Any

from ropecli.engines.checkpoint_positions import CheckpointPositions
from ropecli.engines.engine_table import SAVED_BY_TRANSFORMERS, EngineTable, as_yaml


def _overrides(p: CheckpointPositions) -> dict[str, Any]:
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


ENGINE = EngineTable(
    title="TRL 1.16.0",
    command=lambda p: ("trl", "sft", "--config"),
    overrides=_overrides,
    file_name="trl.yaml",
    file_text=as_yaml,
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
        SAVED_BY_TRANSFORMERS,
    ),
)
