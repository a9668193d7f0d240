"""The torch side of a checkpoint: its model, rotary tables and LM head, and the proof of a patch."""
