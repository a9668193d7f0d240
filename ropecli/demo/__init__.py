"""The embedded checkpoint: a small Llama that `scripts/train_demo.py` trained on Python's standard library.

Its folder is this one, so that `ropecli eval-ppl demo` needs neither a network nor a download.
"""

from pathlib import Path

NAME = "demo"
FOLDER = Path(__file__).parent
