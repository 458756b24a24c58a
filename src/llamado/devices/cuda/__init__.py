"""The CUDA device: NVIDIA cards through the driver that is installed with them."""
