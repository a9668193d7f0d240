"""A key hidden in a long text, and whether a model finds it: `passkey` and `needle`.

templates.py the words · haystack.py the text between · keys.py what is hidden · prompts.py all of it, exact to the
token · reading.py one pass over a prompt and what may follow it · ranking.py, generation.py the two ways to ask ·
grid.py lengths × depths × trials.
"""
