"""Keys and values of past tokens: slot pool, page table (sequence, layer, owner) -> slots, and the placement rule."""
