"""Attention on a card, with the order of operations of `devices/kernels/attention`.

`visible.py` lists the blocks of keys that each mask row sees. A few tokens then take three kernels: scores of all keys
(`scores.py`), weighted values of each segment (`values.py`) and the combination of segments (`combine.py`). Many tokens
take one, a tile of queries per block of threads (`tiles.py`).
"""
