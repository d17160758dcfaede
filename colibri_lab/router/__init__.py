"""Which experts a token uses: the protocol, the softmax oracle, and the hook for routers written elsewhere."""
