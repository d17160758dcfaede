"""Expert pages: frames (memory), policy (what to keep), transfer (moving bytes), and the pager that joins them."""
