"""Flash attention: what each query sees (`visible.py`), a tile of queries against it (`flash.py`), what is done with
one block of keys (`blocks.py`), and results of segments put together (`results.py`).
"""
