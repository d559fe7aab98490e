"""Arithmetic of the decoder family: multiplications and additions, each counted as one.

Counted are matrix products, which are nearly all of it: two for each weight and token forward, and
twice as many backward (Kaplan et al. 2020, arXiv 2001.08361), and those of attention over what a
token may see: half of the context on average, or the window. Recomputed ones are not counted, so
that a utilisation made of these is that of the model, not of the hardware.
"""

from diloco_shared.spec.shapes import Shape, layer_tensors

FORWARD_AND_BACKWARD = 3


def per_token(shape: Shape, context: int) -> float:
    """Operations of training on one token of a sequence of `context`."""
    s = shape
    matrices = sum(a * b for a, b in (d for d in layer_tensors(s).values() if len(d) == 2))
    weights = s.layers * matrices + s.width * s.vocabulary
    seen = sum(_seen(context, 0 if s.attends_to_all(n) else s.window) for n in range(s.layers))
    # Scores and mixtures: two products of a head's width for each pair of tokens.
    attention = 2 * 2 * s.heads * s.head_width * seen
    return FORWARD_AND_BACKWARD * (2.0 * weights + attention)


def _seen(context: int, window: int) -> float:
    """Tokens that a token attends to on average, its own included."""
    if not window or window >= context:
        return (context + 1) / 2
    return (window * (window + 1) / 2 + (context - window) * window) / context
