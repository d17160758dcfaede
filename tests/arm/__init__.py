"""The aarch64 levels of the CPU kernels, cross-compiled and run under qemu-user: `make test-arm`."""
