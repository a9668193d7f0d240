"""llama.cpp, as the copy in llama-cpp-python 0.3.36 (commit 0c1e570) reads flags and GGUF files.

- Kernel (ggml-cpu/ops.cpp, rope_yarn): θ = m·b^(-2i/d) / factors[i]; interpolated θ/s; YaRN's ramp over pairs with
  its ends always rounded (ggml.c, ggml_rope_yarn_corr_dims); cos and sin times attn_factor·(1 + 0.1·ln s).
- Context (llama-context.cpp): with YaRN, --yarn-attn-factor is overwritten, so that the product is 1 + 0.1·ln s;
  the file's `rope.scaling.attn_factor` still multiplies it, and --override-kv sets that, in older builds too.
- Converter (conversion/{base,llama,phi}.py): stores base, linear's factor, and YaRN's factor and window; llama3 as the
  tensor rope_freqs (architecture llama); longrope's factors for phi3 alone, for others silently none; nothing for
  dynamic. What it stores of YaRN's betas and attention factor, the loader does not read back (but grok, mistral3).
- The server caps a request at the file's context_length.
"""

import math
from collections.abc import Sequence

import numpy as np

from ropecli.errors import PatchError
from ropecli.export import wording
from ropecli.export.engine import Export, command_line, engine, number, refusal
from ropecli.export.positions import Positions
from ropecli.rope import ScaledRope
from ropecli.scaling.ntk import ntk_theta
from ropecli.scaling.yarn import by_parts, yarn_attention_factor

BUILD = "0c1e570"
MODEL = "model.gguf"
_CONVERTER = "convert_hf_to_gguf.py"
# model_type -> general.architecture of the file that the converter writes, as --override-kv has to spell it.
_ARCHITECTURES = {
    **dict.fromkeys(("llama", "mistral", "mixtral"), "llama"),
    **{name: name for name in ("qwen2", "qwen3", "gemma", "phi3", "olmo", "granite", "stablelm")},
    "phi": "phi2",
}
# Sliding layers take base and scale from the file there, whatever the flags say.
_SLIDING = ("afmoe", "cohere2", "gemma2", "gpt_oss", "llama4_text", "plamo3", "smallthinker")


@engine("llama.cpp")
def llama_cpp(positions: Positions) -> Export:
    """`llama-server` with the --rope-* and --yarn-* flags, and the window."""
    if positions.nested:
        raise _refusal(positions, "its flags hold for all layers, and these differ by type.", wording.BY_VLLM)
    if positions.model_type in _SLIDING:
        raise _refusal(
            positions, f"its flags leave the sliding layers of {positions.model_type} alone.", wording.BY_VLLM
        )
    if positions.latent and positions.rope_type != "default":
        raise _refusal(positions, "DeepSeek's YaRN is one of its own there.", "Patch with ntk or abf.")
    flags, metadata = _FLAGS[positions.rope_type](positions)
    overridden = _overridden(positions, metadata)
    command = command_line("llama-server", "-m", MODEL, *flags, *overridden, "-c", positions.window, "-np", 1)
    words = [*flags, *overridden]
    overrides = {"-c": str(positions.window)} | dict(zip(words[::2], words[1::2], strict=True))
    return Export("llama.cpp", command, overrides, tuple(_cannot(positions)), tuple(_notes(positions)))


Flags = tuple[list[str], dict[str, str]]
"""Flags of the command line, and metadata of the GGUF to override: key without architecture -> TYPE:VALUE."""


def _default(positions: Positions) -> Flags:
    return _base(positions, positions.rope.rope_theta), {}


def _linear(positions: Positions) -> Flags:
    base = number(positions.rope.rope_theta)
    return ["--rope-scaling", "linear", "--rope-scale", number(positions.factor), "--rope-freq-base", base], {}


def _yarn(positions: Positions) -> Flags:
    rope, main, s = positions.rope, positions.main, positions.factor
    fast, slow = float(main.get("beta_fast", 32.0)), float(main.get("beta_slow", 1.0))
    if not np.allclose(_ramped(rope, s, fast, slow), rope.inv_freq, rtol=1e-6, atol=0):
        raise _refusal(positions, "it always rounds the ends of YaRN's ramp.", "Patch without truncate=false.")
    flags = [
        *("--rope-scaling", "yarn", "--rope-scale", number(s), "--rope-freq-base", number(rope.rope_theta)),
        *("--yarn-orig-ctx", str(positions.original_window), "--yarn-ext-factor", "1"),
        *("--yarn-beta-fast", number(fast), "--yarn-beta-slow", number(slow)),
    ]
    if _usual_attention_factor(positions):
        return flags, {}
    times = rope.attention_factor / yarn_attention_factor(s)
    return flags, {"rope.scaling.attn_factor": f"float:{times:.9g}"}


def _ramped(rope: ScaledRope, s: float, fast: float, slow: float) -> np.ndarray:
    """YaRN's frequencies with the ends of the ramp rounded."""
    return by_parts(rope.geometry, s, fast, slow, True)


def _dynamic(positions: Positions) -> Flags:
    """NTK with the base that dynamic NTK has at the whole window."""
    s = positions.factor
    theta = ntk_theta(positions.rope.geometry, s * positions.window / positions.original_window - (s - 1))
    return _base(positions, theta), {"context_length": f"int:{positions.window}"}


def _llama3(positions: Positions) -> Flags:
    if _ARCHITECTURES.get(positions.model_type) != "llama":
        raise _refusal(
            positions,
            f"no flag has llama3's bands, and its files for {positions.model_type} carry no factors by pair.",
            "Patch with yarn.",
        )
    return _default(positions)


def _longrope(positions: Positions) -> Flags:
    stored = math.isclose(positions.rope.attention_factor, positions.usual_longrope_attention_factor, rel_tol=1e-6)
    if positions.model_type == "phi3" and stored:
        return _default(positions)
    if positions.model_type == "phi3":
        raise _refusal(
            positions,
            "no flag has a factor for each pair, and its converter stores them, but with the attention factor "
            f"√(1 + ln s / ln L) = {positions.usual_longrope_attention_factor:.5g}, where this folder has "
            f"{positions.rope.attention_factor:.5g}.",
            "Patch with ntk or abf, or with longrope and no attention factor of its own.",
        )
    raise _refusal(
        positions,
        f"no flag has a factor for each pair, and its converter drops longrope's for {positions.model_type} without a "
        "word.",
        "A GGUF of architecture llama may carry them: tensors rope_factors_long.weight and rope_factors_short.weight "
        "(float32, base frequency ÷ frequency for each pair), llama.rope.scaling.type longrope, and "
        f"llama.rope.scaling.attn_factor {positions.rope.attention_factor:.9g}. Or patch with yarn.",
    )


_FLAGS = {
    "default": _default,
    "linear": _linear,
    "yarn": _yarn,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "longrope": _longrope,
}


def _base(positions: Positions, rope_theta: float) -> list[str]:
    return ["--rope-scaling", "none", "--rope-freq-base", number(rope_theta)]


def _overridden(positions: Positions, metadata: dict[str, str]) -> Sequence[str]:
    if not metadata:
        return []
    architecture = _ARCHITECTURES.get(positions.model_type)
    if architecture is None:
        raise _refusal(
            positions,
            f"that takes --override-kv ARCHITECTURE.{', '.join(metadata)}, and what its files call "
            f"{positions.model_type} was not looked up; a wrong name would do nothing, silently.",
            "Patch with yarn as it comes, linear, ntk or abf.",
        )
    return ["--override-kv", ",".join(f"{architecture}.{key}={value}" for key, value in metadata.items())]


def _refusal(positions: Positions, reason: str, next_step: str) -> PatchError:
    return refusal(positions, "llama.cpp", reason, next_step)


def _cannot(positions: Positions) -> list[str]:
    if positions.rope_type == "dynamic":
        return [wording.one_table(positions, "llama.cpp has no dynamic NTK")]
    if positions.rope_type == "llama3":
        return [
            "No flag has llama3's bands: they are in the tensor rope_freqs of the file, which convert_hf_to_gguf.py "
            "writes from the patched folder. A file made from the unpatched one stays unscaled, whatever the flags."
        ]
    if positions.rope_type == "longrope":
        return [
            "No flag has longrope's factors: they are in the file, and the long ones serve every request once -c is "
            f"above {positions.original_window}."
        ]
    return []


def _notes(positions: Positions) -> list[str]:
    notes = [*positions.warnings]
    notes.append(
        f"{MODEL} is the {_converted(positions)} "
        f"The server answers up to the file's context_length; the folder as it is gives {positions.written_window}."
    )
    if _carried_by_the_file(positions):
        notes.append(
            f"{MODEL} so made carries the positions itself, and needs no --rope flags; the line spells it out."
        )
    if positions.rope_type == "yarn" and not _usual_attention_factor(positions):
        notes.append(
            "--yarn-attn-factor does not serve here: current builds overwrite it. rope.scaling.attn_factor multiplies "
            "1 + 0.1·ln s."
        )
    if positions.model_type not in _ARCHITECTURES:
        notes.append(f"llama.cpp's file for {positions.model_type} was not read: compare a long answer first.")
    return notes


def _converted(positions: Positions) -> str:
    if not positions.on_hub:
        return f"patched folder, converted: {command_line(_CONVERTER, positions.checkpoint, '--outfile', MODEL)}."
    download = command_line("hf", "download", positions.checkpoint, *positions.at_revision)
    return (
        f"checkpoint, converted, for which a local folder is needed: {download} prints the name of one, DIR; then "
        f"{command_line(_CONVERTER, 'DIR', '--outfile', MODEL)}."
    )


def _usual_attention_factor(positions: Positions) -> bool:
    return math.isclose(positions.rope.attention_factor, yarn_attention_factor(positions.factor), rel_tol=1e-9)


def _carried_by_the_file(positions: Positions) -> bool:
    """Whether what the converter stores of the folder, and the loader reads back, is all that there is to say."""
    if positions.rope_type != "yarn":
        return positions.rope_type in ("default", "linear", "llama3")
    betas = [float(positions.main.get(key, usual)) for key, usual in (("beta_fast", 32.0), ("beta_slow", 1.0))]
    return betas == [32.0, 1.0] and _usual_attention_factor(positions)
