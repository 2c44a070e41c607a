"""All that touches MLX."""
