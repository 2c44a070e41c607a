"""Only wanted positions meet the output layer, and what they get there is the same."""

import mlx.core as mx
import pytest
from headwater.worker.engine.projection import Projection, last_position
from mlx import nn
from mlx.utils import tree_flatten

from tests.exactness.reference import assert_logits_close
from tests.tiny_models import TINY_FAMILIES, VOCABULARY_SIZE, tiny_model

TOKENS = mx.array([[5, 17, 99, 3], [8, 1, 77, 30]])


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_the_last_position_alone_has_the_logits_that_it_has_among_all(family) -> None:
    model = tiny_model(family)
    expected = model(TOKENS)
    projection = Projection(model)
    with projection.only(last_position):
        actual = model(TOKENS)

    assert projection.is_selective
    assert actual.shape == (2, 1, VOCABULARY_SIZE)
    assert_logits_close(actual[:, 0], expected[:, -1])
    assert mx.array_equal(model(TOKENS), expected)


def test_each_row_may_keep_a_position_of_its_own() -> None:
    model = tiny_model("llama")
    positions = mx.array([1, 3])
    with Projection(model).only(lambda hidden: hidden[mx.arange(2), positions][:, None]):
        actual = model(TOKENS)

    expected = model(TOKENS)
    assert_logits_close(actual[:, 0], mx.stack([expected[0, 1], expected[1, 3]]))


def test_a_forward_that_raises_leaves_the_model_as_it_was() -> None:
    model = tiny_model("llama")
    projection = Projection(model)
    with pytest.raises(ValueError, match="stop"), projection.only(last_position):
        raise ValueError("stop")
    assert model(TOKENS).shape[1] == 4


def test_the_output_layer_keeps_its_type_and_its_weights_their_names() -> None:
    model = tiny_model("llama")
    names = [name for name, _ in tree_flatten(model.parameters())]
    Projection(model)
    Projection(model)

    assert isinstance(model.lm_head, nn.Linear)
    assert [name for name, _ in tree_flatten(model.parameters())] == names


class ReversedModel(nn.Module):
    """Does with the logits of all positions what can't be done with those of one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_model("llama")

    @property
    def layers(self):
        return self.inner.layers

    def __call__(self, inputs, cache=None):
        logits = self.inner(inputs, cache=cache)
        return logits + mx.max(logits, axis=1, keepdims=True)


def test_a_model_that_needs_every_position_goes_on_computing_them() -> None:
    model = ReversedModel()
    projection = Projection(model)
    with projection.only(last_position):
        logits = model(TOKENS)

    assert not projection.is_selective
    assert logits.shape[1] == 4
