"""Measures how often `check-served` is wrong about a server that rounds, and prints its table as Markdown.

    python scripts/check_served_noise.py                          # the demo with yarn ×4 is expected, 40 texts
    python scripts/check_served_noise.py --method linear --seeds 10

The servers are the demo in this process: with independent normal noise in every logit, in bfloat16, with weights
rounded as int8, int4 with a scale per 32 weights and int4 with a scale per row, or with keys and values rounded as a
cache in int4 holds them. A seed is a text of 512 tokens and a draw of the noise.
"""

import argparse
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

import ropecli
from ropecli.data.sources import Source
from ropecli.evaluation import served
from ropecli.evaluation.subject import LiveReaderFactory
from ropecli.live.loading import load_tokenizer

LENGTH, FACTOR = 512, 4.0
LOGITS = {"float32": 0.0, "logits, 0.3": 0.3, "logits, 0.6": 0.6, "logits, 1.0": 1.0}
"""Standard deviation."""
KINDS = {
    "bfloat16": None,
    "int8": (8, None),
    "int4 per 32": (4, 32),
    "int4 per row": (4, None),
    "cache in int4": (4, 32),
}
"""Bits, and how many weights of a row share a scale; None: all."""


def rounded(values: torch.Tensor, bits: int, group: int | None) -> torch.Tensor:
    groups = values.unflatten(-1, (-1, group or values.shape[-1]))
    scale = groups.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    return ((groups / scale).round() * scale).flatten(-2)


class Server:
    """The demo with a scaling. kind: one of KINDS, or float32."""

    def __init__(self, method: str, factor: float, kind: str = "float32") -> None:
        from transformers import AutoModelForCausalLM

        demo = ropecli.open_checkpoint("demo")
        self.model = AutoModelForCausalLM.from_pretrained(demo.folder, dtype=torch.float32).eval()
        if method != "none":
            ropecli.live_patch(self.model, ropecli.make_plan(demo, ropecli.make_spec(method, factor)).positions.ropes)
        if kind == "bfloat16":
            self.model = self.model.bfloat16()
        for name, layer in self.model.named_modules():
            if kind.startswith("int") and isinstance(layer, torch.nn.Linear) and name != "lm_head":  # tied
                layer.weight.data = rounded(layer.weight.data, *KINDS[kind])
            elif kind.startswith("cache") and name.endswith(("k_proj", "v_proj")):
                layer.register_forward_hook(lambda layer, inputs, output: rounded(output, *KINDS[kind]))

    @torch.inference_mode()
    def logits(self, reference: served.Reference) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the text's tokens, shape (tokens, vocabulary), and of the single tokens."""
        singles = torch.tensor([[single.token] for single in reference.singles])
        return self.model(torch.tensor([reference.ids])).logits[0].float(), self.model(singles).logits[:, 0].float()


def answers(
    logits: tuple[torch.Tensor, torch.Tensor], reference: served.Reference, noise: float, random: torch.Generator
) -> Iterator[served.Answers]:
    """As a server gives them that returns the prompt's log-probabilities, and as one that does not."""
    text, singles = (
        (part + noise * torch.randn(part.shape, generator=random)).double().log_softmax(-1) for part in logits
    )
    targets = torch.tensor(reference.ids)[1:, None]
    losses = (-text[:-1].gather(-1, targets)[:, 0]).tolist()
    following = [
        {token: float(row[token]) for token in single.following}
        for single, row in zip(reference.singles, singles, strict=True)
    ]
    yield served.Answers(True, {length: losses[: length - 1] for length in reference.scored_lengths}, {}, following)
    next_tokens = {length: top(text[length - 1]) for length in reference.lengths}
    yield served.Answers(False, {}, next_tokens, [top(row) for row in singles])


def top(values: torch.Tensor) -> dict[int, float]:
    best = values.topk(5)
    return dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def references(method: str, seeds: int) -> Iterator[served.Reference]:
    with tempfile.TemporaryDirectory() as folder:
        ropecli.patch("demo", method=method, factor=FACTOR, output=Path(folder) / "patched")
        checkpoint = ropecli.open_checkpoint(Path(folder) / "patched")
        subjects, tokenizer = served.alternatives(checkpoint), load_tokenizer(checkpoint)
        ids = served.read_tokens(Source("demo").texts(), tokenizer, seeds * 10 * LENGTH)
        factory = LiveReaderFactory({"dtype": "float32", "device": "cpu", "attn": "sdpa"})
        for seed in range(seeds):
            part = ids[seed * 10 * LENGTH :][:LENGTH]
            yield served.make_reference(subjects, factory, tokenizer, part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="yarn", help="the method that is expected")
    parser.add_argument("--seeds", type=int, default=40)
    options = parser.parse_args()
    scalings = {
        "right": (options.method, FACTOR),
        "unpatched": ("none", 1.0),
        "half": (options.method, FACTOR / 2),
        "double": (options.method, FACTOR * 2),
    }
    other = "yarn" if options.method == "linear" else "linear"
    scalings[f"{other} ×{FACTOR:g}"] = (other, FACTOR)
    exact = {name: Server(*scaling) for name, scaling in scalings.items()}
    coarse = {(name, kind): Server(*scalings[name], kind) for name in scalings for kind in KINDS}
    verdicts: dict[tuple[bool, str, str], Counter[str]] = defaultdict(Counter)
    holding, differences, times = defaultdict(list), defaultdict(list), defaultdict(list)
    for seed, reference in enumerate(references(options.method, options.seeds)):
        random = torch.Generator().manual_seed(seed)
        for name in scalings:
            plain = exact[name].logits(reference)
            logits = {kind: (plain, noise) for kind, noise in LOGITS.items()}
            logits |= {kind: (coarse[name, kind].logits(reference), 0.0) for kind in KINDS}
            for kind, (values, noise) in logits.items():
                for given in answers(values, reference, noise, random):
                    verdict = served.judge(given, reference)
                    verdicts[given.gives_losses, kind, name][verdict.verdict] += 1
                    checkpoint, *others = verdict.comparisons
                    times[given.gives_losses, kind, name].append(
                        checkpoint.difference / max(verdict.after_single, 1e-9)
                    )
                    if name == "right":
                        differences[given.gives_losses, kind].append(checkpoint.difference)
                        holding[given.gives_losses, kind] += [other.low <= 0 <= other.high for other in others]
    for prompt in (True, False):
        print(f"\nCompared by {'the prompt' if prompt else 'next tokens'}: served, unclear, not served.\n")
        *_, last = scalings
        heads = ["server", "nats", *scalings, "interval holds 0", f"× after a single token: right, {last}"]
        print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
        for kind in (*LOGITS, *KINDS):
            cells = [kind, f"{np.mean(differences[prompt, kind]):.2g}"]
            for name in scalings:
                counts = verdicts[prompt, kind, name]
                cells.append(
                    ", ".join(str(counts[word]) for word in (served.SERVED, served.UNCLEAR, served.NOT_SERVED))
                )
            ratios = ""
            if kind != "float32":  # exactly equal after a single token
                ratios = f"≤ {max(times[prompt, kind, 'right']):.1f}, ≥ {min(times[prompt, kind, last]):.1f}"
            print(f"| {' | '.join(cells)} | {np.mean(holding[prompt, kind]):.0%} | {ratios} |")


if __name__ == "__main__":
    main()
