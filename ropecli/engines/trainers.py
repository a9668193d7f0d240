"""Config files for TRL's SFTTrainer, axolotl, LLaMA-Factory, ms-swift and Unsloth: a row each.

All load the folder with transformers and save it by `save_pretrained`, so the patch applies. The rows were checked by
running the releases in their titles, Unsloth on a CPU. axolotl drops rows longer than `sequence_len`, except of the
type completion, which splits them; `bfd_split` does so in TRL, where other strategies drop or join documents.
"""

from typing import Any

import yaml

from ropecli.engines.engine_table import Case, EngineInput, EngineTable

_SAVED_BY_TRANSFORMERS = (
    (
        "The trained model keeps the scaling, but only in rope_parameters, and has no ropecli.yaml: `ropecli inspect "
        "OUTPUT` prints the command that also writes the fields of transformers 4. Merge adapters with `ropecli merge`."
    ),
    Case(lambda p: p.draft_layers > 0, "transformers does not load the MTP layers, so the trained model has none."),
)
_ATTENTION = {"attn_implementation": "flash_attention_2", "gradient_checkpointing": True, "bf16": True}
_ALONE = {"per_device_train_batch_size": 1}
_OUTPUT = {"output_dir": "OUTPUT"}


def _trainer(
    title: str,
    command: str,
    model: str,
    length: str,
    extra: dict[str, Any],
    *warnings: Case | str,
    refused: tuple[Case, ...] = (),
    revision: str = "model_revision",
) -> EngineTable:
    """Make a trainer's table. model, length, revision: keys of its config file; `section.key` for one in a section."""

    def overrides(p: EngineInput) -> dict[str, Any]:
        section, _, key = length.rpartition(".")
        lengths = {section: {**extra[section], key: p.length}} if section else {key: p.length}
        return {model: p.checkpoint, **({revision: p.revision} if revision and p.revision else {}), **extra, **lengths}

    return EngineTable(
        title=title,
        command=lambda p: command.split(),
        overrides=overrides,
        file_name=f"{title.split()[0].lower()}.yaml",
        file_text=lambda overrides: yaml.safe_dump(overrides, sort_keys=False),
        trains=True,
        refused=refused,
        notes=(*warnings, *_SAVED_BY_TRANSFORMERS),
    )


TRL = _trainer(
    "TRL 1.16.0",
    "trl sft --config",
    "model_name_or_path",
    "max_length",
    {"dataset_name": "DATASET", "packing": True, "packing_strategy": "bfd_split", **_ALONE, **_ATTENTION, **_OUTPUT},
    "Replace DATASET by a Hub id or a folder, with a column of text or messages, and OUTPUT by a folder.",
    "Do not set rope_parameters, rope_scaling or max_position_embeddings in model_init_kwargs: they replace what "
    "config.json has.",
    "Keep max_length: TRL's default is 1,024 tokens. attn_implementation sdpa works too, but its mask takes "
    "max_length² bytes.",
)
AXOLOTL = _trainer(
    "axolotl 0.19.0",
    "axolotl train",
    "base_model",
    "sequence_len",
    {
        **{"datasets": [{"path": "DATASET", "type": "completion"}], "sample_packing": True, "micro_batch_size": 1},
        **{"learning_rate": 2e-5, **_ATTENTION, **_OUTPUT},
    },
    "Replace DATASET by a Hub id or a file, and OUTPUT by a folder. For conversations, set type: chat_template; "
    "axolotl drops those longer than sequence_len.",
    "Do not set base_model_config or model_config (overrides_of_model_config): they replace what config.json has. A "
    "larger sequence_len raises max_position_embeddings without changing the scaling.",
    refused=(
        Case(
            lambda p: p.rope_type == "dynamic",
            "it raises max_position_embeddings to {p.length} tokens, and dynamic scales only beyond that field. Train "
            "with TRL or `ropecli finetune`, or patch with ntk.",
        ),
    ),
)
LLAMA_FACTORY = _trainer(
    "LLaMA-Factory 0.9.5",
    "llamafactory-cli train",
    "model_name_or_path",
    "cutoff_len",
    {
        **{"stage": "pt", "do_train": True, "finetuning_type": "full", "dataset": "DATASET", "flash_attn": "fa2"},
        **{"bf16": True, **_ALONE, **_OUTPUT},
    },
    "Replace DATASET by a name in data/dataset_info.json and OUTPUT by a folder.",
    "Do not set rope_scaling: it replaces the checkpoint's scaling by one with another factor, and with transformers "
    "5 it loses rope_theta. shift_attn trains on another attention.",
    "Keep cutoff_len: the default is 2,048 tokens. Stage pt joins documents, which then see each other; with stage "
    "sft, neat_packing keeps them apart, and longer ones are cut.",
)
MS_SWIFT = _trainer(
    "ms-swift 4.6.0",
    "swift pt",
    "model",
    "max_length",
    {
        **{"use_hf": True, "tuner_type": "full", "dataset": "DATASET", "truncation_strategy": "split"},
        **{"packing": True, "attn_impl": "flash_attention_2", "torch_dtype": "bfloat16", **_ALONE, **_OUTPUT},
    },
    "Replace DATASET by a file or a Hub id (of ModelScope with use_hf: false) and OUTPUT by a folder.",
    "Do not set rope_scaling or max_model_len: the first replaces the checkpoint's scaling, the second its factor. "
    "max_length only cuts the data.",
    "Keep truncation_strategy: the default drops every document longer than max_length. Where ms-swift finds several "
    "model types or templates, add model_type and template: it lists them. The file must end in .yaml.",
)
UNSLOTH = _trainer(
    "Unsloth 2026.10.9",
    "unsloth train --config",
    "model",
    "training.max_seq_length",
    {
        "data": {"dataset": "DATASET", "format_type": "raw"},
        "training": {"training_type": "full", "load_in_4bit": False, "packing": True, "batch_size": 1, **_OUTPUT},
    },
    "Replace DATASET by a Hub id (for files: local_dataset, a list) and OUTPUT by a folder.",
    "Do not raise max_seq_length above the context length, and pass no rope_scaling in Python: both replace the "
    "checkpoint's scaling. The default of max_seq_length is 2,048 tokens.",
    Case(
        lambda p: p.revision is not None,
        "The file has no revision: `hf download {p.quoted}` prints the folder to give as model.",
    ),
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
    revision="",
)
