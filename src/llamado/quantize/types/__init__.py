"""A file per family of types: rows of floats to blocks, and the searches behind them."""
