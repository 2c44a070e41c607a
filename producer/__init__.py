"""The caller's side: tokenize, submit, tail. Needs no MLX."""
