"""How a checkpoint's tensors are dealt to ranks: split rules, one layout a file, and what a directory holds."""
