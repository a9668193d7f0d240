"""Fine-tuning: steps happen in loop.py, processes meet in launch.py, weights are written in finished_weights.py.

stages.py begins a run, finetuning.py a stage of it.
"""
