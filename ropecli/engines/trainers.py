"""Config files for TRL's SFTTrainer, axolotl, LLaMA-Factory, ms-swift and Unsloth. All load the folder with
transformers and save it by `save_pretrained`, so the patch applies.

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

LLaMA-Factory, checked by running release 0.9.5 (model/model_utils/rope.py, hparams, data/processor/pretrain.py):
- `rope_scaling` replaces the checkpoint's by a factor of its own, cutoff_len ÷ the pretraining length rounded up, and
  loses rope_theta with transformers 5. It does nothing where `cutoff_len` is not above the length of config.json.
- Stage `pt` joins documents and cuts them into `cutoff_len` tokens; documents of one row see each other.

ms-swift, checked by running release 4.6.0 (arguments/base_args, model/register.py):
- `max_model_len` replaces the factor of the checkpoint's scaling by max_model_len ÷ the pretraining length, rounded up.
- `truncation_strategy` drops rows above `max_length` by default; `split` cuts them into several.
- Names and dataset ids are of ModelScope without `use_hf`.

Unsloth, checked by running release 2026.10.9 on a CPU (models/{llama,vision,loader}.py, unsloth_cli/config.py):
- llama, mistral, qwen2 and qwen3 have its own rotary class, with transformers' frequencies and attention factor; that
  of gemma and gemma2 ignores a scaling. Other types have transformers' classes.
- A `max_seq_length` above max_position_embeddings replaces the scaling of its own classes by linear, with a warning.
"""

from typing import Any

import yaml

from ropecli.engines.engine_table import Case, EngineInput, EngineTable

_SAVED_BY_TRANSFORMERS = (
    (
        "The trained model keeps the scaling, but only in rope_parameters, and has no ropecli.yaml: `ropecli inspect "
        "OUTPUT` prints the command that also writes the fields of older readers. Merge adapters with `ropecli merge`."
    ),
    Case(lambda p: p.draft_layers > 0, "transformers does not load the MTP layers, so the trained model has none."),
)

_FILL_IN = "Replace DATASET by {} and OUTPUT by a folder."


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
        *_SAVED_BY_TRANSFORMERS,
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
        *_SAVED_BY_TRANSFORMERS,
    ),
)


def _llama_factory_overrides(p: EngineInput) -> dict[str, Any]:
    return {
        "model_name_or_path": p.checkpoint,
        **({} if p.revision is None else {"model_revision": p.revision}),
        "stage": "pt",
        "do_train": True,
        "finetuning_type": "full",
        "dataset": "DATASET",
        "cutoff_len": p.length,
        "flash_attn": "fa2",
        "per_device_train_batch_size": 1,
        "bf16": True,
        "output_dir": "OUTPUT",
    }


LLAMA_FACTORY = EngineTable(
    title="LLaMA-Factory 0.9.5",
    command=lambda p: ("llamafactory-cli", "train"),
    overrides=_llama_factory_overrides,
    file_name="llama-factory.yaml",
    file_text=_as_yaml,
    trains=True,
    notes=(
        _FILL_IN.format("a name in data/dataset_info.json"),
        (
            "Do not set rope_scaling: it replaces the checkpoint's scaling by one with another factor, and with "
            "transformers 5 it loses rope_theta. shift_attn trains on another attention."
        ),
        (
            "Keep cutoff_len: the default is 2,048 tokens. Stage pt joins documents, which then see each other; with "
            "stage sft, neat_packing keeps them apart, and longer ones are cut."
        ),
        *_SAVED_BY_TRANSFORMERS,
    ),
)


def _ms_swift_overrides(p: EngineInput) -> dict[str, Any]:
    return {
        "model": p.checkpoint,
        **({} if p.revision is None else {"model_revision": p.revision}),
        **({"use_hf": True} if p.on_hub else {}),
        "tuner_type": "full",
        "dataset": "DATASET",
        "max_length": p.length,
        "truncation_strategy": "split",
        "packing": True,
        "attn_impl": "flash_attention_2",
        "per_device_train_batch_size": 1,
        "torch_dtype": "bfloat16",
        "output_dir": "OUTPUT",
    }


MS_SWIFT = EngineTable(
    title="ms-swift 4.6.0",
    command=lambda p: ("swift", "pt"),
    overrides=_ms_swift_overrides,
    file_name="ms-swift.yaml",
    file_text=_as_yaml,
    trains=True,
    notes=(
        _FILL_IN.format("a file, or an id of ModelScope (of the Hub with use_hf: true),"),
        (
            "Do not set rope_scaling or max_model_len: the first replaces the checkpoint's scaling, the second its "
            "factor. max_length only cuts the data."
        ),
        (
            "Keep truncation_strategy: the default drops every document longer than max_length. Where ms-swift finds "
            "several model types or templates, add model_type and template: it lists them. The file must end in .yaml."
        ),
        *_SAVED_BY_TRANSFORMERS,
    ),
)


def _unsloth_overrides(p: EngineInput) -> dict[str, Any]:
    return {
        "model": p.checkpoint,
        "data": {"dataset": "DATASET", "format_type": "raw"},
        "training": {
            "training_type": "full",
            "load_in_4bit": False,
            "max_seq_length": p.length,
            "packing": True,
            "batch_size": 1,
            "output_dir": "OUTPUT",
        },
    }


UNSLOTH = EngineTable(
    title="Unsloth 2026.10.9",
    command=lambda p: ("unsloth", "train", "--config"),
    overrides=_unsloth_overrides,
    file_name="unsloth.yaml",
    file_text=_as_yaml,
    trains=True,
    refused=(
        Case(
            lambda p: bool(p.scaled) and p.text_type in ("gemma", "gemma2"),
            "its class for {p.model_type} silently drops the scaling. Patch with ntk or abf, which only change the "
            "base, or train with TRL.",
        ),
        Case(
            lambda p: not p.raised,
            "it replaces the scaling by linear where max_seq_length, {p.length}, is above max_position_embeddings, "
            "{p.written_length}. Raise that field, or train with TRL (dynamic needs it as it is).",
        ),
    ),
    notes=(
        _FILL_IN.format("a Hub id (for files: local_dataset, a list)"),
        (
            "Do not raise max_seq_length above the context length, and pass no rope_scaling in Python: both replace "
            "the checkpoint's scaling. The default of max_seq_length is 2,048 tokens."
        ),
        Case(
            lambda p: p.revision is not None,
            "The file has no revision: `hf download {p.quoted}` prints the folder to give as model.",
        ),
        *_SAVED_BY_TRANSFORMERS,
    ),
)
