"""The CUDA kernels without a GPU: their text on the simulator, against the reference."""
