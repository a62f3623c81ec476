"""The sides of tools/bench_peers: one file a peer (`on_*.py`), what runs one of them (`side`), all in turn (`race`)."""
