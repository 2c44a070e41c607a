"""Products of rows with the keys and the values in their pages."""

import mlx.core as mx

from .page_index import LayerPages
from .products import multiply_chosen, num_parts


def scores_of_pages(queries: mx.array, pages: LayerPages) -> mx.array:
    """Multiply *queries*, (rows, heads, Q, D), by keys: (rows, heads, Q, width * tokens).

    What stands for pads is the score of some other page: mask it.
    """
    rows, heads, num_queries, dim = queries.shape
    parts = num_parts(num_queries, queries.dtype)
    products = pages.entries.products(heads, parts)
    keys = pages.layer.keys.reshape(-1, *pages.layer.keys.shape[2:])
    left = queries.reshape(rows * heads * parts, -1, dim)
    scores = multiply_chosen(
        left, keys.swapaxes(-1, -2), products.of_query, products.of_page
    ).reshape(-1, heads, num_queries, keys.shape[1])
    by_row = scores[pages.entries.of_row].reshape(rows, -1, *scores.shape[1:])
    return by_row.transpose(0, 2, 3, 1, 4).reshape(rows, heads, num_queries, -1)


def values_of_pages(weights: mx.array, pages: LayerPages) -> mx.array:
    """Weigh values by *weights*, (rows, heads, Q, width * tokens): (rows, heads, Q, D)."""
    rows, heads, num_queries, _ = weights.shape
    parts = num_parts(num_queries, weights.dtype)
    products = pages.entries.products(heads, parts)
    values = pages.layer.values.reshape(-1, *pages.layer.values.shape[2:])
    num_tokens, dim = values.shape[1:]
    by_page = weights.reshape(rows, heads, num_queries, -1, num_tokens).transpose(0, 3, 1, 2, 4)
    left = by_page.reshape(-1, num_queries // parts, num_tokens)
    output = multiply_chosen(left, values, products.of_weights, products.of_page)
    # Entry by entry: in a product with zeros, what is not finite would spoil other rows.
    summed = mx.zeros((rows + 1, *output.shape[1:]), output.dtype)
    summed = summed.at[pages.entries.row_of].add(output)
    return summed[:rows].reshape(rows, heads, num_queries, dim)
