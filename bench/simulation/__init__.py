"""What the simulator's bench runs: the cells of its table, and the case of the Rimuru paper."""
