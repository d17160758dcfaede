"""What only a machine with a GPU can show: python -m tests.gpu.run_all --out DIR. The tests of it are in tests/cuda."""
