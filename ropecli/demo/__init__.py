"""The embedded checkpoint `demo`: a small Llama trained on Python's standard library by `scripts/train_demo.py`.

It is in this folder, so `ropecli eval-ppl demo` needs no download.
"""

from pathlib import Path

NAME = "demo"
FOLDER = Path(__file__).parent
