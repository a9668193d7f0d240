"""RULER: thirteen tasks that find out the effective context length (Hsieh et al. 2024, arXiv:2404.06654).

definitions.py: the tasks, their wording, sizes and scores. prompts.py: prompts of exact length. haystacks.py: the text
around the needles.
"""
