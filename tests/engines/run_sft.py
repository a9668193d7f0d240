"""Trains a step with TRL, a LoRA adapter and ScalingCallback, where TRL and Liger are.

    python run_sft.py FOLDER HOME       what the check says, by case, in HOME/checks.json

Triton interprets Liger's kernels on the CPU.
"""

import json
import logging
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2]))

from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from ropecli.errors import ProofError
from ropecli.integrations import ScalingCallback

ONLY_ROPE = {
    "rope": True,
    **dict.fromkeys(("rms_norm", "swiglu", "cross_entropy", "fused_linear_cross_entropy"), False),
}
YARN_2 = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
CASES = {
    "as it is": {},
    "bfloat16": {"bf16": True, "gradient_checkpointing": True},
    "Liger": {"use_liger_kernel": True, "liger_kernel_config": ONLY_ROPE},
    "unscaled": {"model_init_kwargs": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}},
    "factor": {"model_init_kwargs": {"rope_parameters": YARN_2}},
}


class Sentences(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())


def check(folder: str, home: Path, **options) -> str:
    """The error, or what the callback said."""
    said.clear()
    never = {"bf16": False, "gradient_checkpointing": False, "report_to": "none", "save_strategy": "no"}
    sizes = {"max_steps": 1, "max_length": 16, "per_device_train_batch_size": 1}
    arguments = SFTConfig(home / "out", use_cpu=True, **never | sizes | options)
    data = Dataset.from_list([{"text": "Call me Ishmael. Some years ago"}] * 16)
    lora = LoraConfig(r=2, lora_dropout=0.1)
    trainer = SFTTrainer(
        folder, args=arguments, train_dataset=data, peft_config=lora, callbacks=[ScalingCallback(folder)]
    )
    try:
        trainer.train()
    except ProofError as error:
        return str(error)
    return " ".join(said)


if __name__ == "__main__":
    folder, home = sys.argv[1], Path(sys.argv[2])
    said: list[str] = []
    logging.getLogger("ropecli").addHandler(Sentences())
    (home / "checks.json").write_text(json.dumps({name: check(folder, home, **case) for name, case in CASES.items()}))
