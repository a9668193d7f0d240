"""Asks a question in words at the end of a long document, by transformers' own generate.

    python -m real_model_parts.questions FOLDER ... --base FOLDER --texts FOLDER ... --output FILE

A killed run continues after its last checkpoint. Ten facts of questions.txt, one per document: the held-out ones, then
those of calibration, by name. A prompt is one message in the model's chat template: the document from its beginning,
with the fact as a paragraph after the first 256 tokens, then the question. The document is cut so that a prompt has
14,000 tokens. An answer counts if the reply, at most 32 greedy tokens, contains it, in any case. `base` reads 8,000
tokens with the end of the same document, without the fact; `ceiling` is the base, too, with its beginning and the fact.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ropecli.atomic import new_file

_PROMPT, _WITHIN, _BEFORE_FACT, _REPLY = 14_000, 8000, 256, 32


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m real_model_parts.questions")
    parser.add_argument("folders", type=Path, nargs="+", help="checkpoints that read the whole prompt")
    parser.add_argument("--base", type=Path, required=True, help="the checkpoint that they were made of")
    parser.add_argument("--texts", type=Path, nargs="+", required=True, help="folders of documents")
    parser.add_argument("--output", type=Path, required=True)
    asked = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(asked.base)
    documents = [path for folder in asked.texts for path in sorted(folder.iterdir())]
    lines = Path(__file__).with_name("questions.txt").read_text("utf-8").splitlines()[1:]
    cases = [
        (prompts(tokenizer, path.read_text("utf-8"), fact, question), answer, path.name)
        for path, line in zip(documents, lines, strict=False)
        for fact, question, answer in [line.split(" | ")]
    ]
    partial = asked.output.with_suffix(".partial")
    answers = json.loads(partial.read_text("utf-8"))["answers"] if partial.exists() else []
    done = {(answer["checkpoint"], answer["arm"]) for answer in answers}
    arms = [(asked.base, "base"), *((folder, "extended") for folder in asked.folders), (asked.base, "ceiling")]
    for folder, arm in (each for each in arms if (each[0].name, each[1]) not in done):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        for made, answer, name in cases:
            reply = replied(model, tokenizer, made[arm])
            answers.append({"checkpoint": folder.name, "arm": arm, "document": name, "tokens": len(made[arm])})
            answers[-1] |= {"reply": reply, "right": answer.lower() in reply.lower()}
            print(json.dumps(answers[-1], ensure_ascii=False), flush=True)
        with new_file(partial) as part:
            part.write_text(json.dumps({"command": sys.argv[1:], "answers": answers}, ensure_ascii=False), "utf-8")
    partial.replace(asked.output)


def prompts(tokenizer: Any, document: str, fact: str, question: str) -> dict[str, list[int]]:
    """The ids of the message by the arm that reads it."""
    ids = tokenizer(document, verbose=False)["input_ids"]

    def with_fact(count: int) -> str:
        return f"{tokenizer.decode(ids[:_BEFORE_FACT])}\n\n{fact}\n\n{tokenizer.decode(ids[_BEFORE_FACT:count])}"

    def fitted(text: Callable[[int], str], size: int) -> tuple[list[int], int]:
        """The message of the longest text that makes it no longer than `size`, and the tokens of that text."""
        count = size
        while True:
            content = f"{text(count)}\n\n{question} Answer in one sentence."
            words = [{"role": "user", "content": content}]
            made = tokenizer.apply_chat_template(words, add_generation_prompt=True, return_dict=False)
            if len(made) <= size:
                return made, count
            count -= len(made) - size

    extended, end = fitted(with_fact, _PROMPT)
    base, _ = fitted(lambda count: tokenizer.decode(ids[end - count : end]), _WITHIN)
    return {"extended": extended, "base": base, "ceiling": fitted(with_fact, _WITHIN)[0]}


def replied(model: Any, tokenizer: Any, prompt: list[int]) -> str:
    """The greedy reply, at most _REPLY tokens."""
    ids = torch.tensor([prompt])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=_REPLY, do_sample=False)
    return tokenizer.decode(made[0, len(prompt) :], skip_special_tokens=True).strip()


if __name__ == "__main__":
    main()
