"""The fuzz test's random models: `grammar.py` draws them of the blocks in `blocks_*.py`, `run.py` runs them and compares."""
