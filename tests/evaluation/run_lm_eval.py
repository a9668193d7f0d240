"""Runs in an environment with lm-eval: the rolling log-likelihood of texts, as that tool works it out.

python run_lm_eval.py JOB.json RESULT.json
"""

import json
import sys
from pathlib import Path


def main() -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    result = []
    for case in job["cases"]:
        options = {} if case["add_bos_token"] is None else {"add_bos_token": case["add_bos_token"]}
        model = HFLM(
            pretrained=job["checkpoint"],
            max_length=case["length"],
            batch_size=case["batch_size"],
            dtype="float32",
            device="cpu",
            **options,
        )
        requests = [
            Instance(request_type="loglikelihood_rolling", doc={}, arguments=(text,), idx=index)
            for index, text in enumerate(job["texts"])
        ]
        result.append(model.loglikelihood_rolling(requests, disable_tqdm=True))
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
