"""Flash attention: visible key blocks of each query (`visible.py`), a tile of queries (`flash.py`), one block of keys
(`blocks.py`), and the combination of segment results (`results.py`).
"""
